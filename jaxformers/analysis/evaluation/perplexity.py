"""Perplexity of a language model, measured with overlapping windows.

Source: the evaluation of NeuTRENO's table 3, https://arxiv.org/abs/2312.00751.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxformers.data.engine.segments import Segments
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.inference import TrainedModel
from jaxformers.training.evaluate import Evaluator
from jaxformers.training.progress import Progress


def measure_perplexity(
  run: TrainedModel,
  strides: Sequence[int],
  *,
  split: str = "test",
  tokens: Count = 0,
  batch_size: PositiveCount = 32,
) -> list[dict[str, Any]]:
  """Returns `stride`, `perplexity`, `loss` and `count` for each stride.

  Args:
    run: trained language model.
    strides: distances between the starts of consecutive windows in tokens, each
      from 1 to the length of a window.
    split: name of the task's split.
    tokens: number of tokens to score, from the start of the split; 0 for all.
    batch_size: number of windows of a batch.

  Raises:
    UserError: if the model is not a language model, or a stride is out of
      range.
  """
  ranges.check(measure_perplexity, {"tokens": tokens, "batch_size": batch_size})
  source = run.task.splits[choose("split", split, run.task.splits)]
  if not isinstance(source, Segments):
    raise UserError(
      f"The task {run.task.name!r} has no text to predict: give the run of a "
      "language model."
    )
  # Take one more token, since the first has no context and is not scored.
  scored = source.tokens[: tokens + 1] if tokens else source.tokens
  source = dataclasses.replace(source, tokens=scored, most=0)
  # Build the windows of all strides first, which checks the strides.
  windows = [dataclasses.replace(source, stride=stride) for stride in strides]
  # Share one evaluator, so that the model is compiled once.
  evaluate = Evaluator(run.model, "jit", batch_size, (source.length,))
  rows = []
  for stride, segments in zip(strides, windows, strict=True):
    with Progress(len(segments), 0, f"stride {stride}") as progress:
      update = functools.partial(progress.update, batch_size=1)
      scores = evaluate(run.params, segments, update)
    rows.append({"stride": stride, **scores})
  return rows
