"""Evaluation of a split, with every example counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxformers.data.engine.loader import Loader, prefetch
from jaxformers.data.engine.split import Split
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.training import compilers, processes
from jaxformers.training.layout import Layout
from jaxformers.training.losses import LOSSES
from jaxformers.training.run import Run
from jaxformers.training.steps import COLLECTED, eval_step

Tick = Callable[[int], None]  # Takes the number of examples done so far.


def add_sums(total: dict[str, Any], sums: Any) -> dict[str, Any]:
  """Adds sums, which may still be on the device, to totals.

  Returns:
    Totals in float64 as plain numbers and lists, which JSON can hold.
  """
  return total | {
    key: np.add(total.get(key, 0.0), np.asarray(value, np.float64)).tolist()
    for key, value in jax.device_get(sums).items()
  }


def join_rows(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Joins the collected arrays of all batches, without rows of padding."""
  is_real = np.concatenate([part["weights"] for part in parts]) > 0
  return {
    name: np.concatenate([part[name] for part in parts])[is_real]
    for name in parts[0]
    if name != "weights"
  }


class Evaluator:
  """Evaluates parameters on a split; compiles once per padded length.

  Attributes:
    batch_size: number of examples in a batch, rounded up to a multiple of the
      parts that a batch is split into.
    objective: losses and metric of the model.
    lengths: lengths that batches are padded to; longer sequences are cut to the
      last one.
    prepare: compiled function from parameters to the variables of `step`.
    step: compiled evaluation step of a batch.
  """

  def __init__(
    self,
    model: Model,
    mode: str,
    batch_size: int,
    lengths: tuple[int, ...],
    layout: Layout | None = None,
  ) -> None:
    layout = layout or compilers.layout()
    compilers.check_batch("eval_batch_size", batch_size, 1, "one device")
    # Round up; the last batch is filled with examples of weight 0.
    self.batch_size = layout.round_up(batch_size)
    self.lengths = lengths
    self.objective = LOSSES[model.objective]
    # Compile the orthogonal matrices separately from the step that uses them.
    prepare = functools.partial(make_variables, model, placement=layout)
    self.prepare = jax.jit(layout.traced(prepare))
    step = functools.partial(eval_step, model=model)
    self.step, self._place = compilers.compile_step(mode, step, layout)
    self._layout = layout

  def __call__(
    self, params: Any, split: Split, tick: Tick = lambda count: None
  ) -> dict[str, Any]:
    """Returns the means of the objective over a split.

    Args:
      params: tree of parameters.
      split: split whose examples are counted once each.
      tick: called with the number of examples done so far.
    """
    # Compute the orthogonal matrices once for the whole split.
    variables = self.prepare(params)
    total: dict[str, Any] = {}
    waiting: dict[str, Any] = {}
    rows: list[dict[str, np.ndarray]] = []
    # Sum over all batches; each process reads its share of the rows.
    loader = Loader(split, self.lengths, *self._layout.share)
    batches = prefetch(self._place, loader.all(self.batch_size))
    for number, batch in enumerate(batches, 1):
      processes.restart_stall_timer()
      sums = self.step(variables, batch)
      # Read the sums one batch late, so that host and device work in parallel.
      if collected := waiting.pop(COLLECTED, None):
        rows.append(jax.device_get(collected))
      total, waiting = add_sums(total, waiting), sums
      tick(min(number * self.batch_size, len(split)))
    # Read the sums of the last batch.
    if collected := waiting.pop(COLLECTED, None):
      rows.append(jax.device_get(collected))
    means = self.objective.means(add_sums(total, waiting))
    # A metric that is not a mean is computed from all examples at once.
    return means | (split.score(join_rows(rows)) if rows else {})


def make_evaluator(run: Run, length: int = 0) -> Evaluator:
  """Returns the evaluator of a run's model.

  Args:
    run: run of the model.
    length: length that batches are padded to; 0 for the lengths of the run.
  """
  return Evaluator(
    run.model,
    run.config.parallel,
    run.config.eval_batch_size,
    (length,) if length else run.padded_lengths,
    run.layout,
  )


def score_by_length(run: Run, params: Any) -> dict[str, Any]:
  """Returns the scores of the test splits of `Task.test_lengths`.

  Args:
    run: run of the model.
    params: tree of parameters.

  Returns:
    `by_length`, the scores by length; and `accuracy_beyond`, the mean accuracy
    over lengths above the lengths of training, if there are any. {} for a task
    without such splits.
  """
  splits = run.task.splits
  if not run.task.test_lengths:
    return {}
  trained = int(splits["train"].lengths().max())
  scores: dict[str, dict[str, Any]] = {}
  beyond = []
  for length in run.task.test_lengths:
    split = splits[f"test_{length}"]
    longest = int(split.lengths().max())
    scores[str(length)] = make_evaluator(run, longest)(params, split)
    if longest > trained:
      beyond.append(scores[str(length)]["accuracy"])
  mean = {"accuracy_beyond": float(np.mean(beyond))} if beyond else {}
  return {"by_length": scores, **mean}
