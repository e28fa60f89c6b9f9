"""Trained weights of a run, or of an exported model, without its program."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformers.config import RunConfig
from jaxformers.foundations import user_code, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import Task, arrays
from jaxformers.training import exported


class Weights(NamedTuple):
  """A trained model, without its program and its data.

  Attributes:
    params: tree of parameters, NumPy arrays.
    model: section `config.model` of its run.
    task: description of its task; see `Task.description`.
    record: content of its `vocabulary.json`: tokens, classes, sizes.
    step: step of its checkpoint.
    imports: modules of a user's code that it needs; see `config.imports`.
    tokenizer: content of its `tokenizer.json`; None if it has none.
    results: content of its `results.json`; {} if its run has not ended.
  """

  params: Any
  model: dict[str, Any]
  task: Mapping[str, Any]
  record: Mapping[str, Any]
  step: int
  imports: str = ""
  tokenizer: Any = None
  results: Mapping[str, Any] = types.MappingProxyType({})

  @property
  def vocabulary(self) -> tuple[str, ...]:
    """Meaning of its ids; () if its inputs are numbers."""
    return tuple(self.record.get("tokens", ()))

  @property
  def objective(self) -> str:
    """Objective of its task."""
    return self.record["sizes"]["objective"]

  def has_same_head(self, task: Task) -> bool:
    """Returns True if the model predicts what a model of a task predicts."""
    if task.name == arrays.NAME:
      # Examples given in Python have one name, whatever they are.
      return dict(self.task) == task.description()
    return (
      self.task.get("task") == task.name
      and self.objective == task.objective
      and tuple(self.record.get("classes", task.classes)) == task.classes
    )


def read_weights(folder: Path) -> Weights | None:
  """Returns the weights of a run, or of an exported one; None for others.

  Raises:
    UserError: for a run without an evaluated checkpoint, a folder with the runs
      of several seeds, or files that are damaged.
  """
  if exported.is_exported(folder):
    return _read_exported(folder)
  if is_run(folder):
    saved = workdirs.read_config(folder)
    user_code.import_named_by(folder, saved.get("imports", ""))
    config = RunConfig.from_dict(saved)
    best, about = _read_best(folder, config)
    params = jax.device_get(best.state.scored)
    record = workdirs.read_verified(folder, "vocabulary.json")
    fields = (saved["model"], about, record, best.step, config.imports)
    has_results = (folder / "results.json").exists()
    return Weights(params, *fields, *_others(folder, record, has_results))
  refuse_seeds(folder)
  return None


def _read_best(folder: Path, config: RunConfig) -> Any:
  """Returns `read_best`, read again if a training beside has removed files."""
  from jaxformers.training.checkpoint import read_best  # Imports orbax.

  try:
    return read_best(folder, config)
  except (OSError, UserError):
    if (folder / "results.json").exists():
      raise
  return read_best(folder, config)


def refuse_seeds(folder: Path) -> None:
  """Raises UserError for a folder with the runs of several seeds."""
  if seeds := sorted(folder.glob("seed_*")):
    names = ", ".join(seed.name for seed in seeds)
    raise UserError(
      f"{folder} holds the runs of several seeds, {names}: give one of them, "
      f"such as {seeds[0]}."
    )


def is_run(folder: Path) -> bool:
  """Returns True if a folder has the `config.json` of a run."""
  try:
    content = json.loads((folder / "config.json").read_bytes())
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(content, dict) and {"task", "schedule"} <= content.keys()


def _read_exported(folder: Path) -> Weights:
  """Returns the weights of a folder that `exported` has written.

  Reads again if another process has replaced the folder meanwhile.
  """
  while True:
    before = exported.read_record(folder)
    try:
      weights = _read_files(folder)
    except UserError:
      if exported.read_record(folder) == before:
        raise
      continue
    if exported.read_record(folder) == before:
      return weights


def _read_files(folder: Path) -> Weights:
  content, params, files = exported.read_export(folder)
  about = {key: content[key] for key in exported.FIELDS}
  user_code.import_named_by(folder, about["imports"])
  record = workdirs.read_verified(folder, "vocabulary.json")
  tokenizer, results = _others(folder, record, "results.json" in files)
  return Weights(
    params, record=record, **about, tokenizer=tokenizer, results=results
  )


def _others(
  folder: Path, record: Mapping[str, Any], has_results: bool
) -> tuple[Any, Mapping[str, Any]]:
  """Returns `tokenizer` and `results` of `Weights`.

  Args:
    folder: workdir of a run, or an exported model.
    record: content of its `vocabulary.json`.
    has_results: True if it has a `results.json`.
  """
  tokenizer = None
  if workdirs.has_tokenizer(record):
    tokenizer = workdirs.read_tokenizer(folder, record)
  results = (
    workdirs.read_verified(folder, "results.json") if has_results else {}
  )
  return tokenizer, results
