"""Registry of the blocks."""

from jaxformers.foundations.registry import Registry

BLOCKS: Registry = Registry("block", is_open=True)
