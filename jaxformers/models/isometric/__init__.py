"""Layers that mix whole sequences within proven bounds.

`ring` has the filters that keep every distance, `layer` the layers as pure
functions, and `block` the module that owns their parameters; `contractive` has
the block for mixers that expand no distance. Importing it registers both.
"""

from jaxformers.models.isometric import block, contractive, layer, ring

__all__ = ["block", "contractive", "layer", "ring"]
