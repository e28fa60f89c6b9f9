"""Archives, packing, digests and the order of examples of every data set."""
