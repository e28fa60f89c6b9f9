"""Training from Python, on the task of a config or on examples of one's own."""

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
from jaxformers.tasks import PRETRAINING, STATISTICS, Task, arrays, language
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
  """Trains a model, or goes on where a run has stopped; returns its best one.

  Without examples it is what `python -m jaxformers.main` does with the same
  config and workdir. The returned model is that of the best checkpoint, and its
  `results` are those of the test split.

  Args:
    config: path of a config with its arguments, such as
      "lra/text:size=tiny,model=s5" or "configs/mine.py"; or a config itself,
      such as `jaxformers.config.base` makes it, or a `RunConfig`.
    workdir: folder of the run: checkpoints, metrics, results.
    train, validation, test: examples that replace the config's task; see
      `tasks.arrays.from_arrays`. For a config of `lm/` they are lists of texts
      without labels; see `tasks.language.from_texts`. Give the same ones to go
      on with a run.
    options: fields of the config by path, such as {"total_steps": 100,
      "model.d_model": 32}.
    trust: True to import the modules of code that the folder in the field
      `pretrained` names; see `load`.
    **sizes: keywords of `from_arrays`: `classes`, `vocab_size`, `max_len`; for
      a language model `vocab_size` and `max_len`.

  Raises:
    UserError: for a config, or examples, that cannot be trained.
    DivergedError: at the first loss that is not finite.
    KeyboardInterrupt: after Ctrl-C, when everything is saved.
    SystemExit: with 143 after SIGTERM, when everything is saved.
  """
  requirements.require_device()
  loaded, chosen = _load_config(config, options or {})
  _check_sizes(sizes)
  task = None
  if train is not None:
    make = _make_language if loaded.task.get("name") == LANGUAGE else _make_task
    task, section = make(loaded.task, (train, validation, test), sizes)
    with loaded.unlocked():
      statistics = {k: loaded.task[k] for k in STATISTICS if k in loaded.task}
      loaded.task = {"name": arrays.NAME, **section, **statistics}
  elif sizes or validation is not None or test is not None:
    names = sorted({*sizes, "validation" if validation is not None else "test"})
    raise configs.UserError(
      f"{', '.join(names)} describe examples of your own: give train=, too."
    )
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
  """Returns a config with options, and the fields that weights do not replace.

  Args:
    config, options: arguments of `train`.

  Returns:
    The config; and the paths of the fields that the user has chosen, None for
    all that the config lists.
  """
  if isinstance(config, str | Path):
    overrides = [f"--config.{k}={_text(v)}" for k, v in options.items()]
    return configs.load_with(str(config), overrides), {*options}
  # Defaults are nobody's choice: weights may replace them.
  if isinstance(config, RunConfig):
    config = config.without_defaults()
  loaded = configs.base(**configs.plain(config))
  configs.drop_replaced(loaded, options)
  configs.set_options(loaded, options)
  return loaded, None


def _check_sizes(sizes: Mapping[str, Any]) -> None:
  """Raises UserError for a keyword that `train` does not take."""
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
  """Returns the task of examples with labels, and fields of its config."""
  task = arrays.from_arrays(*examples, **sizes)
  pretraining = {k: section[k] for k in PRETRAINING if section.get(k)}
  if "objective" in pretraining:
    task = reconstruct(task, **pretraining)
  return task, pretraining


def _make_language(
  section: Mapping[str, Any], texts: Sequence[Any], sizes: Mapping[str, Any]
) -> tuple[Task, dict[str, Any]]:
  """Returns the task of a language model, and fields of its config."""
  fields = ("tokens", "vocab_size", "max_len", "stride", "eval_windows")
  for name in sizes:
    choose("argument of train for a language model", name, fields)
  options = {key: section[key] for key in fields if key in section} | {**sizes}
  return language.from_texts(*texts, **options), options


def _text(value: Any) -> str:
  """Returns a value as a command line has it."""
  if isinstance(value, str | os.PathLike):
    return str(value)
  return json.dumps(value.item() if isinstance(value, np.generic) else value)
