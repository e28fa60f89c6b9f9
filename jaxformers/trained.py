"""Models of runs that have been trained, from their workdirs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformers.errors import UserError
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.tasks import Task
from jaxformers.training import compilers
from jaxformers.training.run import open_trained_run


@dataclasses.dataclass(frozen=True)
class Trained:
  """A trained model with its task.

  Attributes:
    config: config of the run, as in `config.json`.
    task: task with its splits.
    model: model of the run, applied with `params`.
    params: parameters of the best checkpoint.
    step: step of that checkpoint.
    start: parameters that the run began with, or would have without pre-trained
      ones.
    workdir: workdir of the run.
  """

  config: dict[str, Any]
  task: Task
  model: Model
  params: Any
  step: int
  start: Any = None
  workdir: Path = Path()

  def apply(self, batch_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the model in evaluation as a function, compiled once.

    Args:
      batch_size: inputs at a time; the last are filled up with zeros.

    Returns:
      A function from any number of float32 inputs [k, ...] to outputs [k, ...].
    """
    variables = make_variables(self.model, self.params)
    forward = jax.jit(lambda x: self.model.apply(variables, x, train=False))

    # Every batch has the same size, so that one program serves all.
    def apply_to_all(x: np.ndarray) -> np.ndarray:
      rest = ((0, -len(x) % batch_size), *[(0, 0)] * (x.ndim - 1))
      batches = np.pad(x, rest).reshape(-1, batch_size, *x.shape[1:])
      outputs = [np.asarray(forward(batch)) for batch in batches]
      return np.concatenate(outputs)[: len(x)]

    return apply_to_all

  def sample(
    self, count: int, length: int, split: str = "test", seed: int = 0
  ) -> np.ndarray:
    """Draws examples of a split: ids [count, (2,) n], cut to `length`.

    They are drawn without repetition, by a generator of `seed`; all of the
    split if it has fewer. n is `length` or the task's greatest.

    Raises:
      UserError: for less than one example or token.
    """
    if count < 1 or length < 1:
      raise UserError(
        f"{count} samples of {length} tokens: give at least one of both, by "
        "--samples and --length."
      )
    source = self.task.splits[split]
    rng = np.random.default_rng(seed)
    count = min(count, len(source))
    # Sorted, because that is the order in which examples lie on disk.
    chosen = np.sort(rng.choice(len(source), count, replace=False))
    return source.batch(chosen, min(length, self.task.max_len))["inputs"]


def load(workdir: str | Path) -> Trained:
  """Returns the model of a run with the parameters of its best checkpoint.

  Raises:
    UserError: if there is no run, if the `config.json` is of another program,
      or if no checkpoint was evaluated.
  """
  # The first state gives shapes and placement of what is restored.
  run = open_trained_run(Path(workdir).absolute())
  start = compilers.layout().place_state(run.initial_state())
  with run.checkpoints() as checkpoints:
    best = checkpoints.restore_best(start)
  return Trained(
    *(run.config, run.task, run.model, best.state.scored, best.step),
    start=start.params,
    workdir=run.workdir,
  )
