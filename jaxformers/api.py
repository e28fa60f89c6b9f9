"""Training from Python, on the task of a config or on the user's own data."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxformers import config as configs
from jaxformers import inference
from jaxformers.config import RunConfig
from jaxformers.foundations import paths, requirements, user_code
from jaxformers.foundations.registry import choose
from jaxformers.tasks import (
  DELETION,
  PRETRAINING,
  STATISTICS,
  Task,
  arrays,
  delete,
  language,
)
from jaxformers.tasks.arrays import Examples
from jaxformers.tasks.reconstruction import reconstruct
from jaxformers.training import loop

LANGUAGE = "language"  # Name of the task of language models in configs.
INTERRUPTED = 130  # Exit status of the training loop after Ctrl-C.


def train(
  config: str | Path | Mapping[str, Any] | RunConfig,
  workdir: str | Path,
  *,
  train: Examples = None,
  validation: Examples = None,
  test: Examples = None,
  options: Mapping[str, Any] | None = None,
  trust: bool = False,
  **sizes: Any,
) -> inference.TrainedModel:
  """Trains a model and returns the model of the best checkpoint.

  If the workdir holds an unfinished run of the same config, training resumes
  from its latest checkpoint. If the run is finished, nothing is trained.
  Without examples, `train` does the same as `jaxformers train` with
  the same config and workdir.

  Args:
    config: Path of a config with its arguments, such as
      "lra/text:size=tiny,model=s5" or "configs/mine.py". A `RunConfig` is also
      accepted, and so is a config that `jaxformers.config.base` returns.
    workdir: Folder of the run. It receives checkpoints, metrics and results.
    train: Training examples that replace the task of the config. See
      `tasks.arrays.from_arrays` for the accepted forms. For a config of `lm/`
      they are texts without labels; see `tasks.language.from_texts`. Give the
      same examples again to resume a run.
    validation: Validation examples, in the form of `train`. None holds out a
      tenth of `train`.
    test: Test examples, in the form of `train`. None scores the validation
      examples.
    options: Fields of the config by path, such as {"total_steps": 100,
      "model.d_model": 32}.
    trust: True imports the code modules that the folder in the field
      `pretrained` names; see `load`.
    **sizes: Keywords of `from_arrays`, which are `classes`, `vocab_size` and
      `max_len`. A language model takes `vocab_size`, `vocabulary` and
      `max_len`; see `tasks.language.load_language`.

  Returns:
    The model of the best checkpoint. Its `results` hold the test scores.

  Raises:
    UserError: If the config or the examples cannot be trained on.
    DivergedError: If a loss is not finite.
    OSError: If the disk of the workdir is full or absent.
    KeyboardInterrupt: After Ctrl-C, once a checkpoint is saved.
    SystemExit: With status 143 after SIGTERM, once a checkpoint is saved.

  Example:
    >>> import tempfile
    >>> import jaxformers as jf
    >>> texts = [f"{'good' if k % 2 else 'bad'} film {k}" for k in range(20)]
    >>> labels = ["positive" if k % 2 else "negative" for k in range(20)]
    >>> model = jf.train(
    ...   "lra/text:size=tiny,model=local",
    ...   tempfile.mkdtemp(),
    ...   train=(texts, labels),
    ...   options={
    ...     "total_steps": 2,
    ...     "schedule.warmup_steps": 1,
    ...     "model.num_layers": 1,
    ...   },
    ... )
    >>> model.classes
    ('negative', 'positive')
  """
  requirements.require_device()
  loaded, chosen = _load_config(config, options or {})
  _check_sizes(sizes)
  # Build a task from the user's examples; None keeps the task of the config.
  task = None
  if train is not None:
    make = _make_language if loaded.task.get("name") == LANGUAGE else _make_task
    task, section = make(loaded.task, (train, validation, test), sizes)
    # Record the new task in the config, with the pixel statistics of the old.
    with loaded.unlocked():
      statistics = {k: loaded.task[k] for k in STATISTICS if k in loaded.task}
      loaded.task = {"name": arrays.NAME, **section, **statistics}
    _refuse_unused(options or {}, loaded.task)
  elif sizes or validation is not None or test is not None:
    splits = {"validation": validation, "test": test}
    names = sorted({*sizes, *(k for k, v in splits.items() if v is not None)})
    raise configs.UserError(
      f"{', '.join(names)} describe your own examples: give train= as well."
    )
  # Train to the end, or resume; a notebook gets Ctrl-C as an exception.
  path = paths.expand(workdir).absolute()
  try:
    with user_code.trusting(trust):
      loop.run(loaded, path, task=task, chosen=chosen)
  except SystemExit as stop:
    if stop.code != INTERRUPTED:
      raise
    raise KeyboardInterrupt("Everything is saved.") from None
  return inference.load(path)


def _load_config(
  config: str | Path | Mapping[str, Any] | RunConfig, options: Mapping[str, Any]
) -> tuple[ConfigDict, set[str] | None]:
  """Returns a config with its options applied, and the fields the user chose.

  Pretrained weights do not replace the fields that the user chose.

  Args:
    config, options: arguments of `train`.

  Returns:
    The config, and the paths of the chosen fields. None instead of the paths
    means that the user chose every field that the config lists.
  """
  # A path: options become overrides, as on the command line.
  if isinstance(config, str | Path):
    overrides = [f"--config.{k}={_text(v)}" for k, v in options.items()]
    return configs.load_with(str(config), overrides), {*options}
  # The user did not choose the defaults, so weights may replace them.
  if isinstance(config, RunConfig):
    config = config.without_defaults()
  loaded = configs.base(**configs.plain(config))
  # Drop the options of a replaced optimiser or schedule, then set the new ones.
  configs.drop_replaced(loaded, options)
  configs.set_options(loaded, options)
  return loaded, None


def _refuse_unused(options: Mapping[str, Any], task: Mapping[str, Any]) -> None:
  """Raises UserError for options of the data that own examples replace.

  Args:
    options: argument of `train`.
    task: fields of the task of the examples.
  """
  for name in options:
    head, _, rest = name.partition(".")
    if head == "task" and rest.partition(".")[0] not in task:
      raise configs.UserError(
        f"options[{name!r}] has no effect on your own examples: leave it out. "
        "Give classes, vocab_size and max_len as arguments of train."
      )


def _check_sizes(sizes: Mapping[str, Any]) -> None:
  """Raises UserError for a keyword that `train` does not take."""
  # Collect the parameters of `train` and of `from_arrays`, which gets the rest.
  parameters = {
    name: parameter
    for function in (train, arrays.from_arrays)
    for name, parameter in inspect.signature(function).parameters.items()
  }
  accepted = [
    name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD
  ]
  for name in sizes:
    choose("argument of train", name, accepted)


def _make_task(
  section: Mapping[str, Any], examples: Sequence[Any], sizes: Mapping[str, Any]
) -> tuple[Task, dict[str, Any]]:
  """Builds a task from labelled examples.

  Args:
    section: fields of `config.task`.
    examples: training, validation and test examples.
    sizes: keywords of `from_arrays`.

  Returns:
    The task, and the fields of its section in the config.
  """
  task = arrays.from_arrays(*examples, **sizes)
  # An objective of pretraining replaces the labels by a reconstruction.
  pretraining = {k: section[k] for k in PRETRAINING if section.get(k)}
  if "objective" in pretraining:
    task = reconstruct(task, **pretraining)
  deletion = section.get(DELETION, 0.0)
  task = delete(task, deletion)
  return task, pretraining | ({DELETION: deletion} if deletion else {})


def _make_language(
  section: Mapping[str, Any], texts: Sequence[Any], sizes: Mapping[str, Any]
) -> tuple[Task, dict[str, Any]]:
  """Builds the task of a language model from texts.

  Args:
    section: fields of `config.task`.
    texts: training, validation and test texts.
    sizes: keywords of `train`, which replace fields of the section.

  Returns:
    The task, and the fields of its section in the config.
  """
  fields = (
    *("tokens", "vocab_size", "vocabulary", "max_len"),
    *("stride", "eval_windows"),
  )
  for name in sizes:
    choose("argument of train for a language model", name, fields)
  options = {key: section[key] for key in fields if key in section} | {**sizes}
  task = language.from_texts(*texts, **options)
  return delete(task, section.get(DELETION, 0.0)), options


def _text(value: Any) -> str:
  """Returns a value as it is written on a command line."""
  if isinstance(value, str | os.PathLike):
    return str(value)
  return json.dumps(value.item() if isinstance(value, np.generic) else value)
