"""Arguments of a config file and overrides of its fields, as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxformers.config.run_config import ModelFields, RunConfig
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import unknown

# Sections whose options a command can set even if the config does not list
# them.
OPTION_SECTIONS = (
  ["model", "mixer"],
  ["model", "block"],
  ["optimizer"],
  ["schedule"],
)
GROUPS = ["optimizer", "groups"]  # Its options are groups.KIND.OPTION.
# Fields of pre-training, deletion and pixel statistics, which every config
# accepts.
TASK_OPTIONS = (
  ["task", "objective"],
  ["task", "mask_rate"],
  ["task", "targets"],
  ["task", "deletion"],
  ["task", "mean"],
  ["task", "deviation"],
)
# Options that stay when a command names another optimiser or schedule. Every
# optimiser has them, and so do most schedules.
KEPT_OPTIONS = {
  "optimizer": (
    *("clip_norm", "clip_value", "cap", "cap_max"),
    *("frozen", "groups", "layer_decay"),
  ),
  "schedule": ("learning_rate", "warmup_steps"),
}
# Field names of other packages, with the name of the field here.
SYNONYMS = {
  "bs": "batch_size",
  "depth": "num_layers",
  "dropout": "dropout_rate",
  "heads": "num_heads",
  "hidden_dim": "d_model",
  "hidden_size": "d_model",
  "layers": "num_layers",
  "lr": "learning_rate",
  "max_length": "max_len",
  "max_steps": "total_steps",
  "num_train_steps": "total_steps",
  "random_seed": "seed",
  "seq_len": "max_len",
  "steps": "total_steps",
  "train_steps": "total_steps",
  "warmup": "warmup_steps",
  "wd": "weight_decay",
}
# Pattern of a flag such as `--config.x.y=value` or `--noconfig.x.y`.
OVERRIDE = re.compile(
  r"-+(?P<no>no)?config\.(?P<path>[^=]*)(=(?P<value>.*))?", re.DOTALL
)
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def parse_arg(arg: str | None, **defaults: Any) -> ConfigDict:
  """Parses the string argument "key=value,key=value" of a config file.

  Args:
    arg: text after the colon of `--config=file.py:...`; may be None.
    **defaults: every valid key with its default value. The type of the default
      is the type of the key's values.

  Returns:
    The defaults, overridden by the argument.

  Raises:
    UserError: for an unknown key, for a key that is repeated or has no value,
      or for a value of another type.
  """
  values: dict[str, Any] = {}
  for item in filter(None, (arg or "").split(",")):
    key, equals, text = (part.strip() for part in item.partition("="))
    if key not in defaults:
      raise unknown("config argument", key, defaults)
    # Refuse "key" and "key=", so that no value is silently empty.
    if not equals or not text:
      raise UserError(
        f"The config argument {item!r} has no value: write {key}=VALUE."
      )
    if key in values:
      raise UserError(f"The config argument {key} is given twice: remove one.")
    # The default sets the type: with a default of 0.0, rate=1 is 1.0.
    values[key] = _convert(key, text, type(defaults[key]))
  return ConfigDict(defaults | values)


def _convert(key: str, text: str, kind: type) -> Any:
  """Returns the value of a text; UserError for a text of another type."""
  try:
    # bool("false") would be True.
    return BOOLEANS[text.lower()] if kind is bool else kind(text)
  except (KeyError, ValueError):
    raise UserError(
      f"The config argument {key}={text!r} is not of type {kind.__name__}."
    ) from None


def check_overrides(config: ConfigDict, argv: list[str]) -> None:
  """Checks the flags `--config.x.y=value` for the fields of a config.

  ml_collections rejects wrong flags too, but names neither the section nor the
  choices.

  Raises:
    UserError: for an unknown field, with a suggestion if its name occurs
      elsewhere in the config; or for a value of another type.
  """
  for override in filter(None, map(OVERRIDE.fullmatch, argv)):
    # Walk down the sections that the flag names.
    path = override["path"].split(".")
    section: Any = config
    for depth, key in enumerate(path):
      if not isinstance(section, ConfigDict) or key not in section:
        where = ".".join(("config", *path[:depth]))
        choices = section if isinstance(section, ConfigDict) else ()
        is_field = depth == len(path) - 1
        # Suggest the field that was meant.
        if is_field and (meant := _meant(config, key)):
          raise UserError(
            f"Unknown key of {where}: {key!r}. Did you mean config.{meant}?"
          )
        raise unknown(f"key of {where}:", key, choices)
      section = section[key]
    # Check the type of a number.
    if isinstance(section, int | float) and override["value"] is not None:
      _check_type(override["path"], section, override["value"])


def _meant(config: ConfigDict, name: str) -> str:
  """Returns the path of a field by its name or synonym; "" if not unique.

  A field of the run takes precedence over a field of a section.
  """
  name = SYNONYMS.get(name, name)
  if name in config:
    return name
  # Search the sections, then the defaults of mixers.
  paths = [
    f"{section}.{name}"
    for section in ("schedule", "optimizer", "task", "model")
    if isinstance(config.get(section), ConfigDict) and name in config[section]
  ]
  if not paths and name in config.model.get("mixer_defaults", {}):
    paths = [f"model.mixer_defaults.{name}"]
  return paths[0] if len(paths) == 1 else ""


def _check_type(path: str, current: float, text: str) -> None:
  """Raises UserError if a text is not a number of a field's type."""
  kind = type(current)
  try:
    BOOLEANS[text.lower()] if kind is bool else kind(text)
  except (KeyError, ValueError):
    # Name the range of the field in the message.
    section, _, name = path.rpartition(".")
    owners = {"": RunConfig, "model": ModelFields, "reference": ModelFields}
    owner = owners.get(section)
    intervals = ranges.of(owner) if owner else {}
    allowed = intervals.get(name, ranges.Range(kind))
    raise UserError(
      f"config.{path}={text!r} is not of type {kind.__name__}: give {allowed}."
    ) from None


def drop_replaced(config: ConfigDict, values: Mapping[str, Any]) -> None:
  """Drops the options of an optimiser or a schedule that is replaced.

  A config's options, such as b2 = 0.98, are meant for the optimiser that it
  names. `KEPT_OPTIONS` stay.

  Args:
    config: config, changed in place.
    values: new values of fields by path, such as {"optimizer.name": "lion"}.
  """
  with config.unlocked():
    for name, kept in KEPT_OPTIONS.items():
      section = config.get(name)
      replaced = values.get(f"{name}.name")
      if replaced is None or replaced == section.get("name"):
        continue
      for option in set(section) - {*kept, "name"}:
        del section[option]


def values_of(argv: Sequence[str]) -> dict[str, str]:
  """Returns the values of flags `--config.x.y=text`, by the path "x.y"."""
  matches = filter(None, map(OVERRIDE.fullmatch, argv))
  return {match["path"]: match["value"] or "" for match in matches}


def take_options(
  config: ConfigDict, argv: list[str]
) -> tuple[list[str], dict[str, Any]]:
  """Takes the options that the config does not list out of argv.

  A config lists only the options that its published numbers depend on.
  `models.build` and `optim.build_optimizer` know all options of mixers, blocks,
  optimisers and schedules, and reject unknown ones.

  Returns:
    The other arguments; and the options by path, such as
    {"model.mixer.causal": True}, including options of `optimizer.groups` and
    of `TASK_OPTIONS`. Values are Python values where possible, and text
    otherwise.
  """
  rest, options = [], {}
  for arg in argv:
    # Options are model.mixer.NAME, model.block.NAME, optimizer.NAME,
    # schedule.NAME, optimizer.groups.KIND.NAME and fields of `TASK_OPTIONS`.
    override = OVERRIDE.fullmatch(arg)
    path = override["path"].split(".") if override else []
    is_option = path[:-1] in OPTION_SECTIONS or path in TASK_OPTIONS
    is_option |= len(path) == 4 and path[:2] == GROUPS
    # Leave options that the config lists to ml_collections.
    if override is None or not is_option or _lists(config, path):
      rest.append(arg)
    else:
      # `--noconfig.x` means False, and `--config.x` without a value True.
      text = "false" if override["no"] else override["value"] or "true"
      options[override["path"]] = parse_value(text)
  return rest, options


def _lists(config: ConfigDict, path: list[str]) -> bool:
  """Returns True if a config has the field of a path."""
  section: Any = config
  for name in path:
    if not isinstance(section, ConfigDict) or name not in section:
      return False
    section = section[name]
  return True


def set_options(config: ConfigDict, options: Mapping[str, Any]) -> None:
  """Sets the options from `take_options`; adds sections where needed."""
  # A config of a flag is locked: it refuses fields that it does not have.
  with config.unlocked():
    for path in options:
      section = config
      for name in path.split(".")[:-1]:
        if name not in section:
          section[name] = ConfigDict()
        section = section[name]
    config.update_from_flattened_dict(dict(options))


def parse_value(text: str) -> Any:
  """Returns the Python value of a text, or the text itself."""
  # Commands write booleans in lower case, which Python does not read.
  if text in ("true", "false"):
    return text == "true"
  try:
    return ast.literal_eval(text)  # Numbers, lists and quoted text.
  except (ValueError, SyntaxError):
    return text
