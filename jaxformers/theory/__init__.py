"""Depth efficiency: what can be computed of the third paper's theory."""
