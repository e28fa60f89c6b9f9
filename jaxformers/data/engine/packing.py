"""Packs the examples of a batch behind each other into rows of one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packing:
  """Rows that hold several examples.

  Attributes:
    length: number of tokens of a row.
    most: greatest number of examples of a row.
    unit: number of which the number of rows is a multiple.
  """

  length: int
  most: int
  unit: int = 1

  @property
  def sizes(self) -> tuple[int, int]:
    """Greatest number of examples of a row, and of tokens of an example."""
    return self.most, self.length

  def deal(self, lengths: np.ndarray) -> list[list[int]]:
    """Returns the examples of each row: first fit, the longest ones first.

    Args:
      lengths: number of tokens of every example; longer ones are cut.

    Returns:
      Numbers of examples, and empty lists up to a multiple of `unit`.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for example in np.argsort(-lengths, kind="stable").tolist():
      size = min(int(lengths[example]), self.length)
      fits = (
        k
        for k, row in enumerate(rows)
        if free[k] >= size and len(row) < self.most
      )
      k = next(fits, len(rows))
      if k == len(rows):
        rows.append([])
        free.append(self.length)
      rows[k].append(example)
      free[k] -= size
    return rows + [[] for _ in range(-len(rows) % self.unit)]

  def batch(
    self,
    rows: list[list[int]],
    lengths: np.ndarray,
    fields: Mapping[str, np.ndarray],
  ) -> dict[str, np.ndarray]:
    """Returns the batch of some rows.

    Args:
      rows: places of the examples of each row in `fields`.
      lengths: number of tokens of these examples.
      fields: arrays of the examples, [k, n, ...] for tokens and [k] for one
        value an example.

    Returns:
      The arrays of the rows, [r, length, ...] and [r, most], 0 where there is
      no example; and `segments`, int32 [r, length], the number of the example
      of each token: 1, 2, ..., and 0 at padding.
    """
    batch: dict[str, np.ndarray] = {
      name: np.zeros(
        (len(rows), self.most)
        if array.ndim == 1
        else (len(rows), self.length, *array.shape[2:]),
        array.dtype,
      )
      for name, array in fields.items()
    }
    segments: np.ndarray = np.zeros((len(rows), self.length), np.int32)
    for r, row in enumerate(rows):
      start = 0
      for number, k in enumerate(row):
        stop = start + int(lengths[k])
        segments[r, start:stop] = number + 1
        for name, array in fields.items():
          if array.ndim == 1:
            batch[name][r, number] = array[k]
          else:
            batch[name][r, start:stop] = array[k, : stop - start]
        start = stop
    return batch | {"segments": segments}


def plan(
  lengths: np.ndarray, length: int, batch_size: int, unit: int = 1
) -> Packing:
  """Returns the packing of a split.

  A row may hold twice as many examples as fit on average. Each number of rows
  is another program to compile, so the unit is at least 1 / 16 of the expected
  number.

  Args:
    lengths: number of tokens of every example.
    length: number of tokens of a row; longer examples are cut.
    batch_size: number of examples of a batch.
    unit: number of which the unit of the packing is a multiple.
  """
  mean = max(float(np.minimum(lengths, length).mean()), 1.0)
  most = min(max(round(2 * length / mean), 1), batch_size)
  rows = batch_size * mean / length
  return Packing(length, most, unit * max(round(rows / 16 / unit), 1))
