"""Configs as files and as plain dictionaries: load, compare, describe."""

from __future__ import annotations

import difflib
import inspect
import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxformers import ranges, user_code
from jaxformers.config import arguments
from jaxformers.config.fields import FIELDS, RESUMABLE_FIELDS, base
from jaxformers.errors import UserError

# Configs that come with the package, wherever it is installed.
PACKAGED = Path(__file__).parents[1] / "configs"


def find_file(name: str) -> Path:
  """Returns the file of a config: a path, or one of the package by its name.

  Args:
    name: path of a file; or "lra/text", "lra/text.py" or "configs/lra/text.py"
      for a config of the package, from any folder.

  Raises:
    UserError: if there is neither.
  """
  path = Path(name)
  if path.is_file():
    return path
  packaged = PACKAGED / name.removeprefix("configs/").removesuffix(".py")
  packaged = packaged.with_name(f"{packaged.name}.py")
  if not packaged.is_file():
    typed = name.removeprefix("configs/").removesuffix(".py")
    close = difflib.get_close_matches(typed, packaged_names(), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UserError(
      f"There is no config file {name!r} in {Path.cwd()}, and no config of "
      f"that name in the package.{hint} Give a path, or a name such as "
      "lra/listops: `python -m jaxformers configs` lists the names."
    )
  return packaged


def packaged_names() -> dict[str, Path]:
  """Returns the files of all configs of the package by their names."""
  files = sorted(PACKAGED.rglob("*.py"))
  return {
    path.relative_to(PACKAGED).with_suffix("").as_posix(): path
    for path in files
  }


def load(spec: str) -> ConfigDict:
  """Returns the config of "path/to/file.py:key=value", as `--config` takes it.

  Raises:
    UserError: for a file that does not exist, or is no config, or an argument
      that it does not take.
  """
  name, _, arg = spec.partition(":")
  file = find_file(name)
  try:
    get_config = runpy.run_path(str(file)).get("get_config")
  except (SyntaxError, UnicodeDecodeError) as error:
    # The error may be in a module that the config imports.
    where = getattr(error, "filename", None) or str(file)
    line = getattr(error, "lineno", None)
    raise UserError(
      f"{where}{f', line {line}' if line else ''} is not Python "
      f"({error.args[0]}): correct it, or give a config, such as "
      "configs/lra/listops.py."
    ) from None
  if not callable(get_config) or not _takes_one(get_config):
    raise UserError(
      f"{file} has no function get_config(arg), which returns a config: see "
      "configs/lra/listops.py."
    )
  config = get_config(arg or None)
  if not isinstance(config, ConfigDict):
    raise UserError(
      f"get_config of {file} returns {config!r:.40}: return a "
      "ml_collections.ConfigDict, such as jaxformers.config.base() makes."
    )
  return config


def _takes_one(function: Any) -> bool:
  """Returns True if a function can be called with one argument."""
  try:
    inspect.signature(function).bind(None)
  except TypeError:
    return False
  return True


def load_with(spec: str, overrides: Sequence[str]) -> ConfigDict:
  """Returns the config of `override`, and imports the modules that it names.

  Raises:
    UserError: as `override`, and for a module that cannot be found.
  """
  config = override(spec, overrides)
  user_code.import_modules(config.get("imports", ""))
  return config


def override(spec: str, overrides: Sequence[str]) -> ConfigDict:
  """Returns the config of `load` with some fields set.

  Args:
    spec: path and arguments of the config.
    overrides: arguments such as "--config.model.d_model=64".

  Raises:
    UserError: for a field that the config does not have, or a wrong type.
  """
  loaded = load(spec)
  arguments.drop_replaced(loaded, arguments.values_of(overrides))
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

  A section of the config replaces the whole default of that section.
  """
  return plain(base()) | plain(config)


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
