"""Processing of images on the host: augmentation, corruptions, splits."""
