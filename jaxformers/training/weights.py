"""Trained weights of a run or an exported model, read without its data."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformers.config import RunConfig
from jaxformers.data.engine import vocabularies
from jaxformers.foundations import user_code, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.models import pretrained
from jaxformers.tasks import Task, arrays
from jaxformers.training import exported


class Weights(NamedTuple):
  """Weights of a trained model, and the records that describe it.

  Attributes:
    params: tree of parameters, NumPy arrays.
    model: section `config.model` of the run.
    task: description of the task; see `Task.description`.
    record: content of `vocabulary.json`: tokens, classes and sizes.
    step: step of the checkpoint.
    imports: modules of a user's code that the model needs; see
      `config.imports`.
    tokenizer: content of `tokenizer.json`; None if there is none.
    results: content of `results.json`; {} if the run has not ended.
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
    """Tokens by their ids; () if the inputs are numbers."""
    return tuple(self.record.get("tokens", ()))

  @property
  def objective(self) -> str:
    """Objective of the task."""
    return self.record["sizes"]["objective"]

  def has_same_head(self, task: Task) -> bool:
    """Returns True if the model has the head that another task needs."""
    if task.name == arrays.NAME:
      # All examples given in Python have one task name: compare descriptions.
      return dict(self.task) == task.description()
    return (
      self.task.get("task") == task.name
      and self.objective == task.objective
      and tuple(self.record.get("classes", task.classes)) == task.classes
    )


def read_weights(folder: Path) -> Weights | None:
  """Returns the weights of a run or an exported model; None for other folders.

  Raises:
    UserError: for a run without an evaluated checkpoint, for a folder with the
      runs of several seeds, or for damaged files.
  """
  # Read an exported model.
  if exported.is_exported(folder):
    return _read_exported(folder)
  # Read the best checkpoint of a run.
  if is_run(folder):
    saved = workdirs.read_config(folder)
    user_code.import_named_by(folder, saved.get("imports", ""))
    config = RunConfig.from_dict(saved)
    best, about = _read_best(folder, config)
    params = jax.device_get(best.state.scored)
    record = workdirs.read_verified(folder, "vocabulary.json")
    fields = (saved["model"], about, record, best.step, config.imports)
    has_results = (folder / "results.json").exists()
    tokenizer, results = _others(folder, record, has_results)
    # A run that was made longer has the results of an earlier checkpoint.
    if results.get("best_step", best.step) != best.step:
      results = {}
    return Weights(params, *fields, tokenizer, results)
  # Explain a folder that holds several runs.
  refuse_seeds(folder)
  return None


def read_published(folder: Path) -> Weights:
  """Returns the weights of a language model of Hugging Face.

  Args:
    folder: folder that `pretrained.load` reads. Without a tokenizer.json, the
      inputs of the model are ids.

  Raises:
    UserError: for a model of another kind, for a tokenizer in vocab.json and
      merges.txt only, and in the cases in which `pretrained.load` raises it.
  """
  options = pretrained.read_options(folder)
  objective = options.get("objective", "classification")
  if objective != "language_model":
    raise UserError(
      f"{folder} has no language model: call "
      f'jaxformers.models.pretrained.load("{folder}"), which returns model and '
      "parameters, or train with config.pretrained."
    )
  _, params = pretrained.load(folder)
  names = ("vocab_size", "max_len", "num_classes", "objective")
  sizes = {name: options.pop(name) for name in names}
  # Name ids that the tokenizer does not have by their numbers.
  tokenizer, tokens = None, ["<pad>"]
  if (folder / vocabularies.TOKENIZER).is_file():
    vocabularies.require_unpadded(folder)
    loaded = vocabularies.read_byte_pairs(folder)
    tokenizer, tokens = json.loads(loaded.to_str()), vocabularies.tokens(loaded)
  elif (folder / "vocab.json").is_file():
    raise UserError(
      f"{folder} has the tokenizer in vocab.json and merges.txt: write it as "
      f"{vocabularies.TOKENIZER} with transformers, by "
      "AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)."
    )
  if len(tokens) > sizes["vocab_size"]:
    raise UserError(
      f"{folder / vocabularies.TOKENIZER} has {len(tokens) - 1:,} tokens, but "
      f"the model has {sizes['vocab_size'] - 1:,}: give the tokenizer of the "
      "model."
    )
  tokens += map(str, range(len(tokens), sizes["vocab_size"]))
  record = {
    "task": folder.name,
    "protocol": "Hugging Face",
    "tokens": tokens,
    "tokenizer": "byte_pairs" if tokenizer else "",
    "sizes": sizes | {"num_inputs": 1, "padded_len": 0, "image": []},
  }
  model = {"name": "transformer", **options}
  params = jax.device_get(params)
  return Weights(params, model, {}, record, 0, tokenizer=tokenizer)


def _read_best(folder: Path, config: RunConfig) -> Any:
  """Returns `read_best`, called again if a running training removed files."""
  from jaxformers.training.checkpoint import read_best  # Imports orbax.

  try:
    return read_best(folder, config)
  except (OSError, UserError):
    # A run that has ended removes no files: the error is real.
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
  """Returns the weights of an exported model.

  They are read again if another process replaces the folder meanwhile.
  """
  while True:
    before = exported.read_record(folder)
    try:
      weights = _read_files(folder)
    except UserError:
      # Read again only if the folder was replaced.
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
  """Returns the fields `tokenizer` and `results` of `Weights`.

  Args:
    folder: workdir of a run, or an exported model.
    record: content of the folder's `vocabulary.json`.
    has_results: True if the folder has a `results.json`.
  """
  tokenizer = None
  if workdirs.has_tokenizer(record):
    tokenizer = workdirs.read_tokenizer(folder, record)
  results = (
    workdirs.read_verified(folder, "results.json") if has_results else {}
  )
  return tokenizer, results
