"""Protocol of the splits that training and evaluation read."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

# Seed, step and number of the first row: the seed of augmentation.
Key = tuple[int, int, int]


class Split(Protocol):
  """Examples in a fixed order, read in batches.

  Classes of splits inherit from this protocol, and with it the defaults below.
  """

  @abc.abstractmethod
  def __len__(self) -> int:
    """Returns the number of examples."""

  @abc.abstractmethod
  def lengths(self) -> np.ndarray:
    """Returns the length of every example, int64 [size]."""

  @abc.abstractmethod
  def digest(self) -> str:
    """Returns a digest of all examples."""

  @abc.abstractmethod
  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn examples into inputs, as plain JSON."""

  @abc.abstractmethod
  def batch(
    self, indices: np.ndarray, max_len: int, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples.

    Args:
      indices: numbers of the examples in the split, integers [b].
      max_len: length to which sequences are cut or padded.
      key: seed of augmentation; None to augment nothing.

    Returns:
      Arrays of b rows, such as `inputs` and `targets`; a split that weighs
      tokens also returns `weights`, float32 [b, n].
    """

  @property
  def repeats(self) -> int:
    """Number of copies of an example in a training batch."""
    return 1

  def score(self, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the scores of the rows that the objective has collected."""
    raise AttributeError(f"{type(self).__name__} has no score of rows.")

  def scoring(self) -> dict[str, Any]:
    """Returns how examples are cut for scoring, as plain JSON; {} if uncut."""
    return {}


def row_seeds(
  indices: np.ndarray, key: Key | None, training: int, evaluation: int
) -> list[list[int]]:
  """Returns a seed for the draws of each row of a batch.

  It follows from seed, step and row of the global batch; in evaluation from the
  index of the example. So the draws are the same on any number of processes.

  Args:
    indices: numbers of the examples in the split, integers [b].
    key: seed, step and the first row of this process; None in evaluation.
    training, evaluation: first number of the seeds with and without a key.
  """
  if key is None:
    return [[evaluation, int(i)] for i in indices]
  seed, step, first = key
  return [[training, seed, step, first + k] for k in range(len(indices))]
