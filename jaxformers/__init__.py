"""What Transformers do to their tokens: models, tasks and analyses in JAX."""

__version__ = "0.1.0"
