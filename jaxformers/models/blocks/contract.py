"""The registry of blocks."""

from jaxformers.registry import Registry

BLOCKS: Registry = Registry("block", is_open=True)
