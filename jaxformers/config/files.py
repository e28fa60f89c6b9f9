"""Configs as files and as plain dictionaries: load, compare, describe."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxformers import ranges
from jaxformers.config import arguments
from jaxformers.config.fields import (
  FIELDS,
  REMOVED_FIELDS,
  RENAMED_OPTIONS,
  RESUMABLE_FIELDS,
  base,
)
from jaxformers.errors import UserError


def load(spec: str) -> ConfigDict:
  """Returns the config of "path/to/file.py:key=value", as `--config` takes it.

  Raises:
    UserError: for a file that does not exist or an argument it does not take.
  """
  path, _, arg = spec.partition(":")
  if not Path(path).is_file():
    raise UserError(
      f"There is no config file {path!r} in {Path.cwd()}: give a path such as "
      "configs/lra/listops.py."
    )
  return runpy.run_path(path)["get_config"](arg or None)


def load_with(spec: str, overrides: Sequence[str]) -> ConfigDict:
  """Returns the config of `load` with some fields set, as `jaxformers.main`.

  Args:
    spec: path and arguments of the config.
    overrides: arguments such as "--config.model.d_model=64".

  Raises:
    UserError: for a field that the config does not have, or a wrong type.
  """
  loaded = load(spec)
  rest, options = arguments.take_options(loaded, list(overrides))
  arguments.check_overrides(loaded, rest)
  # Flags of their own, since those of the process are parsed once.
  values = flags.FlagValues()
  argv = ["config", *rest]
  places = {"flag_values": values, "sys_argv": argv}
  try:
    config_flags.DEFINE_config_dict("config", loaded, **places)
    values(argv)
  except (flags.Error, TypeError, KeyError) as error:
    raise UserError(str(error)) from None
  # Add options that the config does not list.
  arguments.set_options(values.config, options)
  return values.config


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns {"model.d_model": 64} for {"model": {"d_model": 64}}.

  An empty section {} remains as a value.
  """
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config as JSON reads it: dictionaries, lists and scalars."""
  if isinstance(config, ConfigDict):
    config = config.copy_and_resolve_references().to_dict()
  # Through JSON: tuples become lists, as in the files of a run.
  return json.loads(json.dumps(config))


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a plain config with defaults for fields that it does not have.

  A config that an older version wrote lacks the fields that were added since;
  `REMOVED_FIELDS` of such a config are left out, and `RENAMED_OPTIONS` of its
  models have their new names.
  """
  # A section of the config replaces the whole default of that section.
  completed = plain(base()) | plain(config)
  for section in ("model", "reference"):
    completed[section] = {
      RENAMED_OPTIONS.get(option, option): value
      for option, value in completed[section].items()
    }
  return {k: v for k, v in completed.items() if k not in REMOVED_FIELDS}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns a line "key: old -> new" for each field in which configs differ.

  `RESUMABLE_FIELDS` are not compared.
  """
  before, after = flatten(old), flatten(new)
  absent = object()  # Differs from every value, None included.
  return [
    f"{key}: {before.get(key, 'absent')!r} -> {after.get(key, 'absent')!r}"
    for key in sorted(before.keys() | after.keys())
    if key not in RESUMABLE_FIELDS
    and before.get(key, absent) != after.get(key, absent)
  ]


def describe(config: ConfigDict) -> str:
  """Returns every field of a config with its value, one per line.

  The fields of a section follow its line, indented, and are named as
  `--config.SECTION.FIELD=VALUE` sets them.
  """
  lines = []
  for name, value in plain(config).items():
    comment = f"  # {FIELDS[name].help}" if name in FIELDS else ""
    if not isinstance(value, dict):
      # A field of the run.
      lines.append(f"  {name}={json.dumps(value)}{comment}{_interval(name)}")
      continue
    # A section, with its fields below.
    lines.append(f"  {name}:{comment}")
    for path, inner in flatten(value, f"{name}.").items():
      lines.append(f"    {path}={json.dumps(inner)}{_interval(path, '  #')}")
  return "\n".join(lines)


def _interval(path: str, before: str = ";") -> str:
  """Returns the interval of a numeric field for `describe`; "" for others."""
  interval = getattr(ranges.find(path), "interval", "")
  return f"{before} in {interval}" if interval else ""
