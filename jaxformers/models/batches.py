"""Inputs of any number, taken in batches of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def apply_in_batches(
  forward: Callable[[np.ndarray], Any], x: np.ndarray, batch_size: int
) -> np.ndarray:
  """Returns the outputs of a compiled function for any number of inputs.

  Every batch has the same size, so that one program serves all.

  Args:
    forward: function of inputs [batch_size, ...].
    x: inputs, [k, ...].
    batch_size: inputs at a time; see `in_batches`.
  """
  batches = in_batches(x, batch_size)
  return np.concatenate([np.asarray(forward(b)) for b in batches])[: len(x)]


def in_batches(x: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
  """Yields x [k, ...] `batch_size` at a time, the last repeated to fill up."""
  for start in range(0, len(x), batch_size):
    rows = np.arange(start, start + batch_size)
    yield x[np.minimum(rows, len(x) - 1)]
