"""The residual forms around a mixer: one layer of an encoder each.

A block is called like a mixer, `block(x, *, mask, carry, train)`, with x in
float32 whatever the compute type is. Its class says how the encoder around it
embeds tokens (`concatenate_positions`) and ends (`final_norm`). Importing this
package registers every block in it, one file each.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")
