"""Scores of a whole split, every example counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxformers import orthogonal
from jaxformers.data.loader import Loader, prefetch
from jaxformers.data.packed import Packed
from jaxformers.models import Classifier
from jaxformers.training import parallel
from jaxformers.training.steps import eval_step


def add(total: dict[str, float], sums: Any) -> dict[str, float]:
  """Adds sums that are still on the device to totals in float64."""
  fetched = jax.device_get(sums)
  return {key: total.get(key, 0.0) + float(fetched[key]) for key in fetched}


def divide(total: dict[str, float]) -> dict[str, float]:
  """Sums to means: the one division. `count` examples, at least one."""
  count = max(total["count"], 1.0)
  return {
    "loss": total["loss"] / count,
    "accuracy": total["correct"] / count,
    "count": int(total["count"]),
  }


class Evaluator:
  """Evaluates parameters on a split; compiled once a length for all
  splits.

  Attributes:
    batch_size: rounded up to a multiple of the number of devices.
    lengths: that batches are padded to; sequences are cut to the last.
  """

  def __init__(
    self,
    model: Classifier,
    mode: str,
    batch_size: int,
    lengths: tuple[int, ...],
  ) -> None:
    devices = len(parallel.devices())
    parallel.check_batch("eval_batch_size", batch_size, 1, "one device")
    self.batch_size = -(-batch_size // devices) * devices
    self.lengths = lengths
    self._rotations = jax.jit(
      functools.partial(orthogonal.rotations, name=model.orthogonal_map)
    )
    step = functools.partial(eval_step, model=model)
    self._step, self._place = parallel.compile_step(mode, step)

  def __call__(
    self,
    params: Any,
    split: Packed,
    tick: Callable[[int], None] = lambda count: None,
  ) -> dict[str, float]:
    """Returns `loss`, `accuracy` and `count` of a split.

    Args:
      params: the tree of parameters.
      split: every example of it is counted, once.
      tick: called with the number of examples done so far.
    """
    variables = {"params": params, "rotations": self._rotations(params)}
    total: dict[str, float] = {}
    waiting: Any = None
    loader = Loader(split, self.lengths)
    batches = prefetch(self._place, loader.all(self.batch_size))
    for number, batch in enumerate(batches, 1):
      sums = self._step(variables, batch)
      # One batch behind, so that host and device work at the same time.
      total = add(total, waiting) if waiting is not None else total
      waiting = sums
      tick(min(number * self.batch_size, len(split)))
    return divide(add(total, waiting))
