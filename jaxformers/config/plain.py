"""Configs as plain JSON: dictionaries, lists and scalars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns {"model.d_model": 64} for {"model": {"d_model": 64}}.

  An empty section {} is kept as a value.
  """
  flat: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config as plain JSON: dictionaries, lists and scalars."""
  if isinstance(config, ConfigDict):
    config = config.copy_and_resolve_references().to_dict()
  # Convert through JSON: tuples become lists, as in the files of a run.
  return json.loads(json.dumps(config, default=dict))
