"""The model of a run, from its workdir alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformers import workdirs
from jaxformers.errors import UserError
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.tasks import Task
from jaxformers.training import resume
from jaxformers.training.checkpoint import Checkpoints
from jaxformers.training.run import Run


@dataclasses.dataclass(frozen=True)
class Trained:
  """A trained model with its task.

  Attributes:
    config: as in `config.json`.
    task: with its splits.
    model: applied with `params`.
    params: of the best checkpoint.
    step: of that checkpoint.
    start: the parameters that the run began with, or would have without
      pre-trained ones.
    workdir: of the run.
  """

  config: dict[str, Any]
  task: Task
  model: Model
  params: Any
  step: int
  start: Any = None
  workdir: Path = Path()

  def apply(self, batch_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """The model in evaluation, for any number of inputs, compiled once.

    Args:
      batch_size: inputs at a time; the last are filled up with zeros.

    Returns:
      A function from float32 inputs [k, ...] to outputs [k, ...].
    """
    own = make_variables(self.model, self.params)
    run = jax.jit(lambda x: self.model.apply(own, x, train=False))

    def outputs(x: np.ndarray) -> np.ndarray:
      found = []
      for start in range(0, len(x), batch_size):
        some = x[start : start + batch_size]
        rest = ((0, batch_size - len(some)), *[(0, 0)] * (x.ndim - 1))
        found.append(np.asarray(run(np.pad(some, rest)))[: len(some)])
      return np.concatenate(found)

    return outputs

  def sample(
    self, count: int, length: int, split: str = "test", seed: int = 0
  ) -> np.ndarray:
    """Ids of some examples of a split, cut to `length` -> [count, (2,) n].

    Drawn without repetition, by a generator of `seed`; all of the split if it
    has fewer. n is `length` or the task's greatest.

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
    chosen = np.sort(rng.choice(len(source), count, replace=False))
    return source.batch(chosen, min(length, self.task.max_len))["inputs"]


def load(workdir: str | Path) -> Trained:
  """Returns the model of a run with the parameters of its best checkpoint.

  Raises:
    UserError: if there is no run, if the `config.json` is of another program,
      or if no checkpoint was evaluated.
  """
  workdir = Path(workdir).absolute()
  resume.check_trained(workdir)
  run = Run(workdirs.read_config(workdir), workdir, eval_only=True)
  about = run.task.description()
  with Checkpoints(run.store, about, run.config) as checkpoints:
    best = checkpoints.restore_best(run.state)
  return Trained(
    run.config,
    run.task,
    run.model,
    best.state.scored,
    best.step,
    run.state.params,
    workdir,
  )
