"""Configs are plain data: what a config file imports, and what reads one."""

from __future__ import annotations

import importlib
from typing import Any

from jaxformers.config.arguments import (
  check_overrides,
  drop_replaced,
  parse_arg,
  parse_value,
  set_options,
  take_options,
  values_of,
)
from jaxformers.config.fields import FIELDS, RESUMABLE_FIELDS, Field, base
from jaxformers.config.files import (
  PACKAGED,
  complete,
  describe,
  differences,
  find_file,
  flatten,
  load,
  load_with,
  override,
  packaged_names,
  plain,
)
from jaxformers.errors import UserError
from jaxformers.registry import choose

__all__ = [
  "FIELDS",
  "PACKAGED",
  "RESUMABLE_FIELDS",
  "Field",
  "UserError",
  "base",
  "check_overrides",
  "choose",
  "complete",
  "describe",
  "differences",
  "drop_replaced",
  "find_file",
  "flatten",
  "load",
  "load_with",
  "override",
  "packaged_names",
  "parse_arg",
  "parse_value",
  "plain",
  "set_options",
  "take_options",
  "values_of",
]

# Config files of users import these names from here, where they used to be.
_MOVED = {
  "DEITS": "vision.DEITS",
  "LRA_SIZES": "lra.SIZES",
  "SIZES": "shared.SIZES",
  "TRANSJECTS": "shared.TRANSJECTS",
  "VASWANIS_ADAM": "shared.VASWANI_ADAM",
  "WITHOUT_FEED_FORWARD": "shared.ATTENTION_ONLY",
  "augmentation": "vision.augmentation",
  "cifar": "vision.cifar",
  "deit_schedule": "vision.deit_schedule",
  "is_tiny": "shared.is_tiny",
  "language_models": "language.model_fields",
  "lra_models": "lra.model_fields",
  "short_models": "short.model_fields",
  "short_schedule": "short.schedule",
  "skyformer_schedule": "lra.skyformer_schedule",
  "tiny_rate": "shared.tiny_rate",
  "tiny_schedule": "shared.tiny_schedule",
  "vision_models": "vision.model_fields",
}


def __getattr__(name: str) -> Any:
  if name not in _MOVED:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  # Recipes build on this package, so they can only be imported on demand.
  module, _, attribute = _MOVED[name].partition(".")
  recipe = importlib.import_module(f"jaxformers.recipes.{module}")
  return getattr(recipe, attribute)
