"""Bounds of distances between tokens, and the encoder's inverse."""
