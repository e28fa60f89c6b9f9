"""Reads the config and the results of a run from its workdir, and checks them.

Other programs write files of these names too: a folder of Hugging Face has a
`config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Fields that every file of this package has, with their types.
CONFIG_FIELDS = {"seed": int, "task.name": str, "model.name": str}
RESULTS_FIELDS = {
  "task": str,
  "protocol": str,
  "model": str,
  "seed": int,
  "config": Mapping,
  "max_len": int,
  "parameters": int,
  "parameter_ratio": (int, float),
  "baselines": Mapping,
  "data": Mapping,
  "selection": str,
  "train_seconds": (int, float),
}


def read_config(folder: Path) -> dict[str, Any]:
  """Returns the content of a run's `config.json`.

  Raises:
    ValueError: for a file that this package did not write; names the file, what
      is wrong with it, and what to give instead.
  """
  config = _read(folder, "config.json")
  check_config(folder, "config.json", config)
  return config


def read_results(folder: Path) -> dict[str, Any]:
  """Returns the content of a run's `results.json`.

  Raises:
    ValueError: as `read_config`.
  """
  results = _read(folder, "results.json")
  _check(folder, "results.json", results, RESULTS_FIELDS)
  return results


def check_config(folder: Path, name: str, config: Any) -> None:
  """Raises ValueError if a config is not one of this package.

  Args:
    folder: workdir of the run.
    name: file that the config was read from.
    config: its content.
  """
  _check(folder, name, config, CONFIG_FIELDS)


def _read(folder: Path, name: str) -> dict[str, Any]:
  try:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
  except (ValueError, OSError) as error:
    raise _foreign(folder, f"{name} cannot be read as JSON: {error}") from None
  if not isinstance(content, dict):
    raise _foreign(folder, f"{name} holds no JSON object")
  return content


def _check(
  folder: Path, name: str, content: Any, fields: Mapping[str, Any]
) -> None:
  for field, kind in fields.items():
    value = content
    for key in field.split("."):
      value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, kind):
      problem = "is missing" if value is None else f"is {value!r}"
      raise _foreign(folder, f"the field {field!r} of {name} {problem}")


def _foreign(folder: Path, problem: str) -> ValueError:
  return ValueError(
    f"{folder} is no run of this package: {problem}. Give the --workdir of a "
    "run that jaxformers trained."
  )
