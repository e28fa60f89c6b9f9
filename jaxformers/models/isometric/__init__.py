"""Layers that mix the tokens of a sequence within proven bounds.

`ring` has the filters, which preserve every distance; `layer` has the layers as
pure functions; `block` has the module that owns their parameters. `contractive`
has the block for nonexpansive mixers. Importing this package
registers both blocks.
"""

from jaxformers.models.isometric import block, contractive, layer, ring

__all__ = ["block", "contractive", "layer", "ring"]
