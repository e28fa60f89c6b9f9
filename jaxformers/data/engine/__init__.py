"""Archives, packing, digests and the order of examples, for any data set."""
