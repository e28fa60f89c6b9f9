"""Which examples a step sees: pure functions of the seed and the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxformers.data.packed import Packed


class TrainOrder:
  """Epoch after epoch of all examples, each in an order of its own.

  `order(step)` is the batch of a step whatever was asked before, so a run that
  is taken up again sees what it would have seen.

  Attributes:
    size: number of examples.
    batch_size: examples a step, also across the end of an epoch.
    seed: of the run.
  """

  def __init__(self, size: int, batch_size: int, seed: int) -> None:
    if not size:
      raise ValueError("The training split is empty: there is no order of it.")
    self.size, self.batch_size, self.seed = size, batch_size, seed
    self._epochs: dict[int, np.ndarray] = {}

  def _epoch(self, epoch: int) -> np.ndarray:
    if epoch not in self._epochs:
      while len(self._epochs) > 1:  # Memory for two epochs, not for all.
        self._epochs.pop(min(self._epochs))
      rng = np.random.default_rng([self.seed, epoch])
      self._epochs[epoch] = rng.permutation(self.size)
    return self._epochs[epoch]

  def __call__(self, step: int) -> np.ndarray:
    """The examples of a step, counted from 0 -> int64 [batch_size]."""
    places = step * self.batch_size + np.arange(self.batch_size)
    epochs, within = np.divmod(places, self.size)
    return np.concatenate(
      [self._epoch(int(e))[within[epochs == e]] for e in np.unique(epochs)]
    )


def train_batch(
  split: Packed, indices: np.ndarray, max_len: int
) -> dict[str, np.ndarray]:
  """The examples of some indices, all of weight one.

  Returns:
    inputs int32 [b, max_len], targets int32 [b], weights float32 [b].
  """
  batch = split.batch(indices, max_len)
  return batch | {"weights": np.ones(len(indices), np.float32)}


def eval_batches(
  split: Packed, batch_size: int, max_len: int
) -> Iterator[dict[str, np.ndarray]]:
  """Every example of a split once, in order, in batches of one size.

  The last batch is filled up with its first example at weight zero.
  """
  for start in range(0, len(split), batch_size):
    indices = np.arange(start, start + batch_size)
    real = indices < len(split)
    batch = split.batch(np.where(real, indices, start), max_len)
    yield batch | {"weights": real.astype(np.float32)}
