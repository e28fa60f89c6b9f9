"""The registry of blocks."""

from jaxformers.foundations.registry import Registry

BLOCKS: Registry = Registry("block", is_open=True)
