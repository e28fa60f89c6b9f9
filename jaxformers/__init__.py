"""Transformer models, tasks and analyses of their tokens, in JAX."""

__version__ = "0.1.0"
