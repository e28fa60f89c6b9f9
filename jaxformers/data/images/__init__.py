"""Images on the host: decoding, augmentation, corruptions, splits."""
