"""Batches of equal size from any number of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def apply_in_batches(
  forward: Callable[[np.ndarray], Any], x: np.ndarray, batch_size: int
) -> np.ndarray:
  """Returns the outputs of a compiled function for any number of inputs.

  Every batch has the same size, so that the function is compiled once.

  Args:
    forward: function of a batch, [batch_size, ...].
    x: inputs, [k, ...].
    batch_size: number of inputs in a batch; see `in_batches`.
  """
  # Cut off the outputs of the repeated inputs.
  batches = in_batches(x, batch_size)
  return np.concatenate([np.asarray(forward(b)) for b in batches])[: len(x)]


def in_batches(x: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
  """Yields batches of x [k, ...], the last one filled with the last input."""
  for start in range(0, len(x), batch_size):
    rows = np.arange(start, start + batch_size)
    yield x[np.minimum(rows, len(x) - 1)]
