"""Configs as plain data: functions that write, load, override and read them."""

from __future__ import annotations

from jaxformers.config.arguments import (
  check_overrides,
  drop_replaced,
  parse_arg,
  parse_value,
  set_options,
  take_options,
  values_of,
)
from jaxformers.config.files import (
  PACKAGED,
  describe,
  find_file,
  import_named,
  load,
  load_with,
  override,
  packaged_names,
)
from jaxformers.config.plain import flatten, plain
from jaxformers.config.run_config import (
  FIELDS,
  LOGS,
  RESUMABLE_FIELDS,
  SECTIONS,
  Choice,
  ModelFields,
  RunConfig,
  TaskChoice,
  base,
  complete,
  differences,
)
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

__all__ = [
  "FIELDS",
  "LOGS",
  "PACKAGED",
  "RESUMABLE_FIELDS",
  "SECTIONS",
  "Choice",
  "ModelFields",
  "RunConfig",
  "TaskChoice",
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
  "import_named",
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
