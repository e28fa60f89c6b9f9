"""Mixers, one per file, and their helpers.

Importing this package registers all its mixers. The mixer of TransJect is in
`models/transject`.
"""

import importlib
import pkgutil


def import_modules() -> list[str]:
  """Imports every module of this package; returns their names, sorted."""
  names = sorted(module.name for module in pkgutil.iter_modules(__path__))
  for name in names:
    importlib.import_module(f"{__name__}.{name}")
  return names


__all__ = import_modules()
