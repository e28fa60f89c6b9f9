"""Config files: how to find, load, override and describe them."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxformers.config import arguments
from jaxformers.config.plain import flatten, plain
from jaxformers.config.run_config import FIELDS
from jaxformers.foundations import ranges, user_code
from jaxformers.foundations.errors import UserError

# Configs of the package, wherever it is installed.
PACKAGED = Path(__file__).parents[1] / "configs"


def find_file(name: str) -> Path:
  """Returns the file of a config, from its path or its name in the package.

  Args:
    name: path of a file; or "lra/text", "lra/text.py" or "configs/lra/text.py"
      for a config of the package, from any folder.

  Raises:
    UserError: if there is neither such a file nor such a name.
  """
  # A path comes first, then a name in the package.
  path = Path(name)
  if path.is_file():
    return path
  packaged = PACKAGED / name.removeprefix("configs/").removesuffix(".py")
  packaged = packaged.with_name(f"{packaged.name}.py")
  if not packaged.is_file():
    # Suggest the closest name.
    typed = name.removeprefix("configs/").removesuffix(".py")
    close = difflib.get_close_matches(typed, packaged_names(), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UserError(
      f"There is no config file {name!r} in {Path.cwd()}, and no config of "
      f"that name in the package.{hint} Give a path, or a name such as "
      "lra/listops: `jaxformers configs` lists the names."
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
    UserError: if the file does not exist or is not a config, or for an argument
      that the config does not accept.
  """
  # Run the file, which must define get_config.
  name, _, arg = spec.partition(":")
  file = find_file(name)
  try:
    get_config = runpy.run_path(str(file)).get("get_config")
  except (SyntaxError, UnicodeDecodeError) as error:
    # The error may be in a module that the file imports.
    where = getattr(error, "filename", None) or str(file)
    line = getattr(error, "lineno", None)
    raise UserError(
      f"{where}{f', line {line}' if line else ''} is not Python "
      f"({error.args[0]}): correct it, or give a config, such as "
      "configs/lra/listops.py."
    ) from None
  if not callable(get_config) or not _takes_one(get_config):
    raise UserError(
      f"{file} has no function get_config(arg) that returns a config: see "
      "configs/lra/listops.py."
    )
  # Call get_config with the argument after the colon.
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
  """Imports the modules that overrides name; returns the config of `override`.

  Raises:
    UserError: see `override`; and for a module that cannot be found.
  """
  import_named(overrides)
  config = override(load(spec), overrides)
  user_code.import_modules(config.get("imports", ""))
  return config


def import_named(overrides: Sequence[str]) -> None:
  """Imports the modules of `--config.imports` before a config is read.

  The recipes of the config then know the models that these modules register.

  Args:
    overrides: arguments such as "--config.imports=mine".

  Raises:
    UserError: for a module that cannot be found.
  """
  user_code.import_modules(arguments.values_of(overrides).get("imports", ""))


def override(loaded: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
  """Returns a copy of a config with some fields set.

  Args:
    loaded: result of `load`.
    overrides: arguments, such as "--config.model.d_model=64".

  Raises:
    UserError: for a field that the config does not have, or a wrong type.
  """
  loaded = copy.deepcopy(loaded)
  # Drop the options of a replaced optimiser or schedule, and check the names.
  arguments.drop_replaced(loaded, arguments.values_of(overrides))
  rest, options = arguments.take_options(loaded, list(overrides))
  arguments.check_overrides(loaded, rest)
  # Use separate flags, because the flags of the process are parsed only once.
  values = flags.FlagValues()
  argv = ["config", *rest]
  places = {"flag_values": values, "sys_argv": argv}
  try:
    config_flags.DEFINE_config_dict("config", loaded, **places)
    values(argv)
  except (flags.Error, TypeError, KeyError) as error:
    raise UserError(str(error)) from None
  # Add the options that the config does not list.
  arguments.set_options(values.config, options)
  return values.config


def describe(
  config: ConfigDict,
  find: Callable[[str], ranges.Range | None] = lambda path: None,
) -> str:
  """Returns a line for each field of a config, with its value.

  The fields of a section follow the line of the section, indented. They are
  named as `--config.SECTION.FIELD=VALUE` sets them.

  Args:
    config: config of a run.
    find: function that returns the range of a field by its path, such as
      "model.d_model".
  """

  def interval(path: str, before: str = ";") -> str:
    span = find(path)
    return f"{before} in {span.interval}" if span and span.interval else ""

  lines = []
  for name, value in plain(config).items():
    comment = f"  # {FIELDS[name]}" if name in FIELDS else ""
    if not isinstance(value, dict):
      # Write a field of the run.
      lines.append(f"  {name}={json.dumps(value)}{comment}{interval(name)}")
      continue
    # Write a section, and its fields below.
    lines.append(f"  {name}:{comment}")
    for path, inner in flatten(value, f"{name}.").items():
      lines.append(f"    {path}={json.dumps(inner)}{interval(path, '  #')}")
  return "\n".join(lines)
