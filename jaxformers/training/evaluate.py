"""Scores of a whole split, every example counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxformers.data.engine.loader import Loader, prefetch
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.training import parallel, processes
from jaxformers.training.layout import Layout
from jaxformers.training.losses import OBJECTIVES
from jaxformers.training.steps import eval_step


def add(total: dict[str, Any], sums: Any) -> dict[str, Any]:
  """Adds sums that are still on the device to totals, float64 as plain JSON."""
  fetched = jax.device_get(sums)
  return {
    key: np.add(total.get(key, 0.0), np.asarray(value, np.float64)).tolist()
    for key, value in fetched.items()
  }


class Evaluator:
  """Evaluates parameters on a split; compiled once a length for all
  splits.

  Attributes:
    batch_size: rounded up to a multiple of the parts it is split into.
    objective: of the model.
    lengths: that batches are padded to; sequences are cut to the last.
  """

  def __init__(
    self,
    model: Model,
    mode: str,
    batch_size: int,
    lengths: tuple[int, ...],
    layout: Layout | None = None,
  ) -> None:
    layout = layout or parallel.layout()
    parallel.check_batch("eval_batch_size", batch_size, 1, "one device")
    self.batch_size = -(-batch_size // layout.parts) * layout.parts
    self.lengths = lengths
    self.objective = OBJECTIVES[model.objective]
    self._prepared = jax.jit(
      functools.partial(make_variables, model, placement=layout)
    )
    step = functools.partial(eval_step, model=model)
    self._step, self._place = parallel.compile_step(mode, step, layout)
    self._share = layout.share

  def __call__(
    self,
    params: Any,
    split: Any,
    tick: Callable[[int], None] = lambda count: None,
  ) -> dict[str, Any]:
    """Returns what the objective's `means` are of a split.

    Args:
      params: the tree of parameters.
      split: every example of it is counted, once.
      tick: called with the number of examples done so far.
    """
    variables = self._prepared(params)
    total: dict[str, Any] = {}
    waiting: Any = None
    loader = Loader(split, self.lengths, *self._share)
    batches = prefetch(self._place, loader.all(self.batch_size))
    for number, batch in enumerate(batches, 1):
      processes.alive()
      sums = self._step(variables, batch)
      # One batch behind, so that host and device work at the same time.
      total = add(total, waiting) if waiting is not None else total
      waiting = sums
      tick(min(number * self.batch_size, len(split)))
    return self.objective.means(add(total, waiting))
