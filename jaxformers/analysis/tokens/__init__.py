"""Entropy, smoothness and dynamical isometry of the layers' tokens."""
