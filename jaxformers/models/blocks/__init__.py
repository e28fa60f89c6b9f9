"""Blocks: layers of an encoder, each a residual form around a mixer.

A block is called like a mixer, `block(x, *, mask, carry, train)`, with x in
float32 for every compute type. Two attributes of its class configure the
encoder: `concatenate_positions`, and `final_norm` for a norm after the last
layer. Importing this package registers every block; each has its own file.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")
