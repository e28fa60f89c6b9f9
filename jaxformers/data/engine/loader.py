"""Makes batches: each is a pure function of the seed and the step.

Sequences differ in length, so batches need padding. With several `pad_lengths`,
the examples of a window of steps are sorted by length, cut into batches, and
the batches are shuffled. Every example is still seen once per epoch, after the
first steps, which may read only short examples. A batch is padded to the
smallest of the lengths that fits, so at most one shape per length is compiled.

With a `Packing` the examples of a step stand behind each other in rows of one
length instead. The order of the examples is then the plain one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from jaxformers.data.engine.packing import Packing
from jaxformers.data.engine.split import Split
from jaxformers.foundations.errors import UserError

WINDOW = 16  # Number of steps whose examples are sorted together by length.


def pad_lengths(
  max_len: int, buckets: int, short_length: int = 0
) -> tuple[int, ...]:
  """Returns ascending lengths; the last is max_len.

  They are `buckets` equally spaced lengths up to max_len, and as many up to
  short_length if it is between 0 and max_len. Returns (0,) if max_len is 0,
  because images have no length.

  Raises:
    UserError: for fewer than one bucket.
  """
  if buckets < 1:
    raise UserError(f"buckets={buckets} is not positive: choose 1 or more.")
  steps = max(min(buckets, max_len), 1)
  lengths = {-(-max_len * k // steps) for k in range(1, steps + 1)}
  if 0 < short_length < max_len:
    lengths |= {*pad_lengths(short_length, buckets)}
  return tuple(sorted(lengths))


def fitting(longest: int, lengths: tuple[int, ...]) -> int:
  """Returns the smallest length of at least `longest`, or else the last."""
  return next((n for n in lengths if n >= longest), lengths[-1])


class TrainOrder:
  """Training order: every epoch visits all examples in a new random order.

  `order(step)` does not depend on earlier calls, so a resumed run reads the
  same batches as an uninterrupted run.

  Attributes:
    size: number of examples.
    batch_size: number of examples per step; a batch may span two epochs.
    seed: seed of the run.
    lengths: length of every example [size], for batches of similar lengths;
      None if all batches are padded to the same length.
    repeats: copies of each example within a batch or two consecutive batches
      (repeated augmentation); one pass over the data takes `repeats` times as
      many steps.
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
    # Consecutive steps need at most two epochs and two windows.
    self._epoch = functools.lru_cache(2)(self._draw_epoch)
    self._window = functools.lru_cache(2)(self._deal_window)

  def _draw_epoch(self, epoch: int) -> np.ndarray:
    """Returns the permutation of the examples in an epoch, int64 [size]."""
    return np.random.default_rng([self.seed, epoch]).permutation(self.size)

  def _stream(self, places: np.ndarray) -> np.ndarray:
    """Returns the examples at places of the concatenation of all epochs."""
    # Place p is example p // repeats of the concatenated epochs.
    epochs, within = np.divmod(places // self.repeats, self.size)
    return np.concatenate(
      [self._epoch(int(e))[within[epochs == e]] for e in np.unique(epochs)]
    )

  def _deal_window(self, window: int) -> np.ndarray:
    """Returns the examples of a window of steps, [WINDOW, batch_size]."""
    assert self.lengths is not None  # See `__call__`.
    total = WINDOW * self.batch_size
    examples = self._stream(window * total + np.arange(total))
    # Sort by length, cut into batches, and shuffle the batches.
    examples = examples[np.argsort(self.lengths[examples], kind="stable")]
    rng = np.random.default_rng([self.seed, 1, window])
    return examples.reshape(WINDOW, -1)[rng.permutation(WINDOW)]

  def __call__(self, step: int) -> np.ndarray:
    """Returns the examples of a step, counted from 0, int64 [batch_size]."""
    # Without lengths, take the next examples of the stream.
    if self.lengths is None:
      places = step * self.batch_size + np.arange(self.batch_size)
      examples = self._stream(places)
      if self.repeats > 1:
        # Shuffle the batch: mixup pairs neighbours, which must not be copies
        # of the same example.
        rng = np.random.default_rng([self.seed, 4, step])
        examples = rng.permutation(examples)
      return examples
    # With lengths, look up the batch in its window.
    window, within = divmod(step, WINDOW)
    return self._window(window)[within]


class Loader:
  """Reads the batch of a training step, or every example once.

  Attributes:
    split: split of the examples.
    lengths: ascending lengths to which batches are padded; sequences are cut to
      the last one.
    process, num_processes: number of this process, and number of processes.
      Process p of k reads the p-th of k equal parts of every batch. All
      processes compute the order of all examples.
    packing: rows that hold several examples; None for one example a row.
    is_sorted: True for training batches of similar lengths, if batches are
      padded to several lengths.
  """

  def __init__(
    self,
    split: Split,
    lengths: tuple[int, ...],
    process: int = 0,
    num_processes: int = 1,
    packing: Packing | None = None,
    *,
    is_sorted: bool = True,
  ) -> None:
    self.split, self.lengths, self.packing = split, lengths, packing
    self.is_sorted = is_sorted and len(lengths) > 1 and packing is None
    self.process, self.num_processes = process, num_processes
    self._longest = split.lengths()

  def order(
    self,
    batch_size: int,
    seed: int,
    short_steps: int = 0,
    short_length: int = 0,
  ) -> Callable[[int], np.ndarray]:
    """Returns the order of training: the examples of each step.

    Args:
      batch_size: number of examples per step.
      seed: seed of the run.
      short_steps: number of first steps that read only short examples; all
        later steps read all examples.
      short_length: greatest length of a short example.

    Raises:
      UserError: if no example is short, the examples have no lengths, or the
        split is empty.
    """

    def make(lengths: np.ndarray) -> TrainOrder:
      longest = lengths if self.is_sorted else None
      repeats = self.split.repeats
      return TrainOrder(len(lengths), batch_size, seed, longest, repeats)

    every = make(self._longest)
    if not short_steps:
      return every
    if not self._longest.max():
      raise UserError(
        f"config.short_steps={short_steps}: examples of this task have no "
        "lengths. Remove it."
      )
    short = np.flatnonzero(self._longest <= short_length)
    if not len(short):
      raise UserError(
        f"config.short_length={short_length}: the shortest training example "
        f"has {self._longest.min()} tokens, so give at least this length, or "
        "short_steps=0."
      )
    first = make(self._longest[short])
    return lambda step: (
      short[first(step)] if step < short_steps else every(step - short_steps)
    )

  def batch(
    self, indices: np.ndarray, key: tuple[int, int] | None = None
  ) -> dict[str, np.ndarray]:
    """Returns the rows of this process in a batch, all with weight one.

    Args:
      indices: examples of the global batch, over all processes.
      key: (seed, step) of augmentation; None to augment nothing.

    Returns:
      The fields of the split's `batch`, such as `inputs` and `targets`, for the
      b rows of this process and a length n of `lengths`; and `weights`, float32
      [b], or [b, n] if the split weighs tokens. For packed rows see
      `Packing.batch`.
    """
    if self.packing:
      return self._packed(self.packing, indices, key)
    return self._rows(indices, np.ones(len(indices), np.float32), key)

  def all(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields every example once, short ones first, in batches of equal size.

    Fills the last batch up with copies of its first example, at weight zero.
    """
    # Sort by length, so that few batches are padded to the largest length.
    order = np.arange(len(self.split))
    if len(self.lengths) > 1:
      order = np.argsort(self._longest, kind="stable")
    # Yield batches of equal size; only the last one has weights of zero.
    for start in range(0, len(order), batch_size):
      places = start + np.arange(batch_size)
      is_real = places < len(order)
      indices = order[np.where(is_real, places, start)]
      yield self._rows(indices, is_real.astype(np.float32))

  def _packed(
    self, packing: Packing, indices: np.ndarray, key: tuple[int, int] | None
  ) -> dict[str, np.ndarray]:
    """Returns the packed rows of this process in a batch."""
    lengths = np.minimum(self._longest[indices], packing.length)
    rows = packing.deal(lengths)
    count = len(rows) // self.num_processes
    first = self.process * count
    rows = rows[first : first + count]
    # Read the examples of these rows, padded to the longest of them.
    places = np.array([k for row in rows for k in row], np.int64)
    if not len(places):
      places = np.zeros(1, np.int64)  # For the types of the fields.
    row_key = None if key is None else (*key, first)
    longest = int(lengths[places].max())
    fields = self.split.batch(indices[places], longest, row_key)
    fields = {"weights": np.ones(len(places), np.float32)} | fields
    # Number the examples by their places in `fields`.
    number = {int(k): i for i, k in enumerate(places)}
    rows = [[number[k] for k in row] for row in rows]
    return packing.batch(rows, lengths[places], fields)

  def _rows(
    self,
    indices: np.ndarray,
    weights: np.ndarray,
    key: tuple[int, int] | None = None,
  ) -> dict[str, np.ndarray]:
    # Pad to the longest sequence of all processes, so that shapes agree.
    length = fitting(int(self._longest[indices].max()), self.lengths)
    # Read the rows of this process.
    count = len(indices) // self.num_processes
    rows = slice(self.process * count, (self.process + 1) * count)
    row_key = None if key is None else (*key, rows.start)
    batch = self.split.batch(indices[rows], length, row_key)
    weights = weights[rows]
    # Multiply the weights of tokens [b, n] by the weights of examples [b].
    if "weights" in batch:
      weights = batch["weights"] * weights[:, None]
    return batch | {"weights": weights}


def prefetch(
  make: Callable[[Any], Any],
  keys: Iterable[Any],
  ahead: int = 2,
  threads: int = 1,
) -> Generator[Any, None, None]:
  """Yields make(key) for every key, computed ahead of time in threads.

  Args:
    make: slow function, such as one that reads a batch and copies it to its
      devices.
    keys: arguments of `make`, in order.
    ahead: number of results that are computed before they are needed.
    threads: number of threads.
  """
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    jobs = (pool.submit(make, key) for key in keys)
    waiting = collections.deque(itertools.islice(jobs, ahead + 1))
    try:
      # Yield the oldest result, and keep `ahead` other jobs in flight.
      while waiting:
        yield waiting.popleft().result()
        waiting.extend(itertools.islice(jobs, 1))
    finally:
      # Cancel the rest if the caller has stopped early or `make` has raised.
      for job in waiting:
        job.cancel()
