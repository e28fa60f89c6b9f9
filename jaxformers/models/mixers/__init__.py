"""The mixers, one file each; importing this package registers them."""

from jaxformers.models.mixers import softmax, transject

__all__ = ["softmax", "transject"]
