"""Batches of a step: pure functions of the seed and the step.

Sequences differ in length, and a batch is as long as its longest. With several
`pad_lengths` the examples of a window of steps are sorted by length before they
are dealt to its batches, and the batches shuffled: every example is still seen
once per epoch, and a batch is padded to the smallest of a few lengths that
fits, so that no more shapes are compiled than there are lengths.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from jaxformers.data.engine.split import Split
from jaxformers.foundations.errors import UserError

WINDOW = 16  # Steps whose examples are sorted by length together.


def pad_lengths(max_len: int, buckets: int) -> tuple[int, ...]:
  """Returns `buckets` lengths up to max_len, equally far apart, ascending.

  (0,) where max_len is 0: images have no length.

  Raises:
    UserError: for fewer than one bucket.
  """
  if buckets < 1:
    raise UserError(f"buckets={buckets} is not positive: choose 1 or more.")
  steps = max(min(buckets, max_len), 1)
  return tuple(-(-max_len * k // steps) for k in range(1, steps + 1))


def fitting(longest: int, lengths: tuple[int, ...]) -> int:
  """Returns the smallest length that is at least `longest`, else the last."""
  return next((n for n in lengths if n >= longest), lengths[-1])


class TrainOrder:
  """Order of training: epochs of all examples, each shuffled differently.

  `order(step)` does not depend on earlier calls, so a run that resumes sees
  the batches that it would have seen.

  Attributes:
    size: number of examples.
    batch_size: examples a step, also across the end of an epoch.
    seed: seed of the run.
    lengths: length of every example [size], to batch examples of similar
      length together; None where all are padded alike.
    repeats: how often an example occurs in a batch, or in two that follow each
      other; so many epochs are as long as one without repeats.
  """

  def __init__(
    self,
    size: int,
    batch_size: int,
    seed: int,
    lengths: np.ndarray | None = None,
    repeats: int = 1,
  ) -> None:
    if not size:
      raise UserError(
        "The training split is empty: give data with training examples."
      )
    self.size, self.batch_size, self.seed = size, batch_size, seed
    self.lengths, self.repeats = lengths, repeats
    # Steps that follow one another share an epoch and a window, or two.
    self._epoch = functools.lru_cache(2)(self._draw_epoch)
    self._window = functools.lru_cache(2)(self._deal_window)

  def _draw_epoch(self, epoch: int) -> np.ndarray:
    return np.random.default_rng([self.seed, epoch]).permutation(self.size)

  def _stream(self, places: np.ndarray) -> np.ndarray:
    """Returns the examples at places of the endless sequence of epochs."""
    epochs, within = np.divmod(places // self.repeats, self.size)
    return np.concatenate(
      [self._epoch(int(e))[within[epochs == e]] for e in np.unique(epochs)]
    )

  def _deal_window(self, window: int) -> np.ndarray:
    """Returns the batches of a window of steps, [WINDOW, batch_size]."""
    assert self.lengths is not None  # See `__call__`.
    total = WINDOW * self.batch_size
    examples = self._stream(window * total + np.arange(total))
    # Sort by length, cut into batches, and shuffle the batches.
    examples = examples[np.argsort(self.lengths[examples], kind="stable")]
    rng = np.random.default_rng([self.seed, 1, window])
    return examples.reshape(WINDOW, -1)[rng.permutation(WINDOW)]

  def __call__(self, step: int) -> np.ndarray:
    """Returns the examples of a step, counted from 0, int64 [batch_size]."""
    if self.lengths is None:
      places = step * self.batch_size + np.arange(self.batch_size)
      examples = self._stream(places)
      if self.repeats > 1:
        # Mixup pairs neighbours: they must not be copies of one example.
        rng = np.random.default_rng([self.seed, 4, step])
        examples = rng.permutation(examples)
      return examples
    window, within = divmod(step, WINDOW)
    return self._window(window)[within]


class Loader:
  """Batches of a split: those of a training step, or every example once.

  Attributes:
    split: the examples.
    lengths: lengths that batches are padded to, ascending; sequences are cut
      to the last.
    process, num_processes: rows of every batch that are read: process p of k
      reads the p-th k-th of it. All processes know the order of all examples.
  """

  def __init__(
    self,
    split: Split,
    lengths: tuple[int, ...],
    process: int = 0,
    num_processes: int = 1,
  ) -> None:
    self.split, self.lengths = split, lengths
    self.process, self.num_processes = process, num_processes
    self._longest = split.lengths()

  def order(self, batch_size: int, seed: int) -> TrainOrder:
    """Returns the order of training."""
    longest = self._longest if len(self.lengths) > 1 else None
    return TrainOrder(
      len(self.split), batch_size, seed, longest, self.split.repeats
    )

  def batch(
    self, indices: np.ndarray, key: tuple[int, int] | None = None
  ) -> dict[str, np.ndarray]:
    """Returns this process's rows of a batch, all of weight one.

    Args:
      indices: examples of the batch of all processes.
      key: (seed, step) of augmentation; None for none.

    Returns:
      The fields of the split's `batch`, `inputs` and `targets` among them, with
      b the rows of this process and n one of `lengths`; and weights float32
      [b], or [b, n] where a split weighs tokens.
    """
    return self._rows(indices, np.ones(len(indices), np.float32), key)

  def all(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields every example once, short ones first, in batches of one size.

    The last batch is filled up with its first example at weight zero.
    """
    # Sort by length, so that few batches are padded to the longest.
    order = np.arange(len(self.split))
    if len(self.lengths) > 1:
      order = np.argsort(self._longest, kind="stable")
    # Yield batches of one size; only the last one has weights of zero.
    for start in range(0, len(order), batch_size):
      places = start + np.arange(batch_size)
      is_real = places < len(order)
      indices = order[np.where(is_real, places, start)]
      yield self._rows(indices, is_real.astype(np.float32))

  def _rows(
    self,
    indices: np.ndarray,
    weights: np.ndarray,
    key: tuple[int, int] | None = None,
  ) -> dict[str, np.ndarray]:
    # Every process pads to the longest sequence of all, so shapes agree.
    length = fitting(int(self._longest[indices].max()), self.lengths)
    count = len(indices) // self.num_processes
    rows = slice(self.process * count, (self.process + 1) * count)
    row_key = None if key is None else (*key, rows.start)
    batch = self.split.batch(indices[rows], length, row_key)
    weights = weights[rows]
    if "weights" in batch:  # The split weighs tokens, not only examples.
      weights = batch["weights"] * weights[:, None]
    return batch | {"weights": weights}


def prefetch(
  make: Callable[[Any], Any],
  keys: Iterable[Any],
  ahead: int = 2,
  threads: int = 1,
) -> Generator[Any, None, None]:
  """Yields make(key) for every key, computed ahead in threads.

  Args:
    make: slow function: reads a batch, and places it on its devices.
    keys: arguments of `make`, in order.
    ahead: number of results that are computed before they are asked for.
    threads: number of threads.
  """
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    jobs = (pool.submit(make, key) for key in keys)
    waiting = collections.deque(itertools.islice(jobs, ahead + 1))
    try:
      # Yield the oldest result, and keep `ahead` others under way.
      while waiting:
        yield waiting.popleft().result()
        waiting.extend(itertools.islice(jobs, 1))
    finally:
      # The caller may have stopped early, or `make` has raised.
      for job in waiting:
        job.cancel()
