"""Protocol of the splits that are trained on and scored."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

# Seed, step and number of the first row, from which augmentation draws.
Key = tuple[int, int, int]


class Split(Protocol):
  """Examples in an order of their own, read in batches.

  A class of splits inherits from it, which gives it the defaults below.
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
    """Returns how a model reads the examples, as plain JSON."""

  @abc.abstractmethod
  def batch(
    self, indices: np.ndarray, max_len: int, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples.

    Args:
      indices: integers [b] within the split.
      max_len: length that sequences are cut or padded to.
      key: key of augmentation; None for none.

    Returns:
      Arrays of b rows, `inputs` and `targets` among them; and `weights`,
      float32 [b, n], of a split that weighs tokens.
    """

  @property
  def repeats(self) -> int:
    """How often an example occurs in a batch of training."""
    return 1

  def score(self, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns scores of all rows that the objective of a split collects."""
    raise AttributeError(f"{type(self).__name__} has no score of rows.")

  def scoring(self) -> dict[str, Any]:
    """Returns how examples are cut to be scored, as plain JSON; {} if not."""
    return {}
