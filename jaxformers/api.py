"""Training from Python, on the task of a config or on examples of one's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers import config as configs
from jaxformers import inference, paths, requirements
from jaxformers.tasks import PRETRAINING, STATISTICS, arrays
from jaxformers.tasks.arrays import Examples
from jaxformers.tasks.reconstruction import reconstruct
from jaxformers.training import loop

INTERRUPTED = 130  # Exit status of the training loop after Ctrl-C.


def train(
  config: str | Path | Mapping[str, Any],
  workdir: str | Path,
  *,
  train: Examples = None,
  validation: Examples = None,
  test: Examples = None,
  options: Mapping[str, Any] | None = None,
  **sizes: Any,
) -> inference.TrainedModel:
  """Trains a model, or goes on where a run has stopped; returns its best one.

  Without examples it is what `python -m jaxformers.main` does with the same
  config and workdir. The returned model is that of the best checkpoint, and its
  `results` are those of the test split.

  Args:
    config: path of a config with its arguments, such as
      "lra/text:size=tiny,model=s5" or "configs/mine.py"; or a config itself,
      such as `jaxformers.config.base` makes it.
    workdir: folder of the run: checkpoints, metrics, results.
    train, validation, test: examples in place of the config's task; see
      `tasks.arrays.from_arrays`. Give the same ones to go on with a run.
    options: fields of the config by path, such as {"total_steps": 100,
      "model.d_model": 32}.
    **sizes: `classes`, `vocab_size` and `max_len` of `from_arrays`.

  Raises:
    UserError: for a config, or examples, that cannot be trained.
    DivergedError: at the first loss that is not finite.
    KeyboardInterrupt: after Ctrl-C, when everything is saved.
    SystemExit: with 143 after SIGTERM, when everything is saved.
  """
  requirements.require_device()
  if isinstance(config, str | Path):
    overrides = [f"--config.{k}={_text(v)}" for k, v in (options or {}).items()]
    loaded = configs.load_with(str(config), overrides)
    chosen = {*(options or {})}  # Weights replace what the config says besides.
  else:
    chosen = None
    loaded = configs.base(**configs.plain(config))
    configs.drop_replaced(loaded, options or {})
    configs.set_options(loaded, options or {})
  task = None
  if train is not None:
    task = arrays.from_arrays(train, validation, test, **sizes)
    section = loaded.task
    pretraining = {k: section[k] for k in PRETRAINING if section.get(k)}
    if "objective" in pretraining:
      task = reconstruct(task, **pretraining)
    with loaded.unlocked():
      statistics = {k: section[k] for k in STATISTICS if k in section}
      loaded.task = {"name": arrays.NAME, **pretraining, **statistics}
  elif sizes or validation is not None or test is not None:
    names = sorted({*sizes, "validation" if validation is not None else "test"})
    raise configs.UserError(
      f"{', '.join(names)} describe examples of your own: give train=, too."
    )
  path = paths.expand(workdir).absolute()
  try:
    loop.run(loaded, path, task=task, chosen=chosen)
  except SystemExit as stop:
    if stop.code != INTERRUPTED:
      raise
    raise KeyboardInterrupt("Everything is saved.") from None
  return inference.load(path)


def _text(value: Any) -> str:
  """Returns a value as a command line has it."""
  if isinstance(value, str | os.PathLike):
    return str(value)
  return json.dumps(value.item() if isinstance(value, np.generic) else value)
