"""Layers that mix whole sequences without changing a distance.

`ring` has the filters, `layer` the layers as pure functions, and `block` the
module that owns their parameters. Importing it registers the block.
"""

from jaxformers.models.isometric import block, layer, ring

__all__ = ["block", "layer", "ring"]
