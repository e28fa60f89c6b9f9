"""Splits of time series with several channels, of equal or unequal lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxformers.data.engine import digests
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.split import Key, Split
from jaxformers.foundations.errors import UserError


@dataclasses.dataclass(frozen=True)
class Series(Split):
  """Time series, whose steps are tokens of c real numbers.

  Series k is values[starts[k]:stops[k]].

  Attributes:
    values: steps of all series, float32 [total, c]; NaN where a number is
      missing.
    starts, stops: bounds of every series, int64 [count].
    labels: class of every series, int32 [count].
    keys: identifiers of the series, uint64 [count].
    mean, deviation: numbers that normalise each channel; () for 0 and 1.
    include_time: True for a first channel with the time of each step, from 0 to
      below 1 over the series.
  """

  values: np.ndarray
  starts: np.ndarray
  stops: np.ndarray
  labels: np.ndarray
  keys: np.ndarray
  mean: tuple[float, ...] = ()
  deviation: tuple[float, ...] = ()
  include_time: bool = False

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, k: int) -> np.ndarray:
    """Returns series k, normalised and with its time, float32 [length, c]."""
    steps = np.asarray(self.values[self.starts[k] : self.stops[k]])
    return normalise(steps, self.reading())

  @property
  def channels(self) -> int:
    """Number of channels of a step, with the channel of the time."""
    return self.values.shape[1] + self.include_time

  def lengths(self) -> np.ndarray:
    """Returns the number of steps of every series, int64 [count]."""
    return self.stops - self.starts

  def digest(self) -> str:
    """Returns the digest of all values, bounds, labels and keys."""
    content = digests.of_array(self.values)
    arrays = (self.starts, self.stops, self.labels, self.keys)
    return digests.of_parts(content, *arrays)

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn series into inputs, as plain JSON."""
    return {
      "mean": list(self.mean),
      "deviation": list(self.deviation),
      "include_time": self.include_time,
    }

  def select(self, indices: Any) -> Series:
    """Returns the split of the series at `indices`, in this order."""
    names = ("starts", "stops", "labels", "keys")
    parts = {name: getattr(self, name)[indices] for name in names}
    return dataclasses.replace(self, **parts)

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of series, cut and padded with NaN on the right.

    Args:
      indices: numbers of the series in the split, integers [b].
      max_len: n, the number of steps of every row of the batch.
      key: ignored, because series are not augmented.

    Returns:
      inputs, float32 [b, n, c], and targets, int32 [b].
    """
    del key
    return {
      "inputs": pad([self[int(k)] for k in indices], max_len),
      "targets": self.labels[indices],
    }


def normalise(series: np.ndarray, reading: Any) -> np.ndarray:
  """Returns a series as a model reads it, float32 [length, c].

  Args:
    series: steps of one series, [length, c], or without `include_time` of
      several, [b, length, c].
    reading: settings; see `Series.reading`.
  """
  series = np.asarray(series, np.float32)
  if reading.get("mean"):
    mean, deviation = (
      np.asarray(reading[name], np.float32) for name in ("mean", "deviation")
    )
    series = (series - mean) / deviation
  if reading.get("include_time"):
    time = np.arange(len(series), dtype=np.float32) / max(len(series), 1)
    # Steps without numbers stay masked.
    time = np.where(np.isnan(series).all(1), np.nan, time)
    series = np.concatenate([time[:, None], series], 1)
  return series


def has_no_numbers(series: np.ndarray) -> bool:
  """Returns True for a series without numbers, or with infinite ones."""
  with np.errstate(over="ignore"):
    series = np.asarray(series, np.float32)
  return bool(np.isinf(series).any() or np.isnan(series).all())


def require_numbers(split: Series, name: str, max_len: int) -> None:
  """Raises UserError for a series whose first max_len steps have no number.

  Args:
    split: split to check.
    name: its name, for the message.
    max_len: length to which series are cut.
  """
  bounds = zip(split.starts, split.stops, strict=True)
  for k, (start, stop) in enumerate(bounds):
    if np.isnan(split.values[start : min(stop, start + max_len)]).all():
      raise UserError(
        f"{name} has a series without numbers in its first {max_len} steps at "
        f"{k}: remove it, or give a greater max_len."
      )


def pad(series: list[np.ndarray], length: int) -> np.ndarray:
  """Returns series [n_i, c] as an array [b, length, c], with NaN at the end."""
  rows = np.full((len(series), length, series[0].shape[1]), np.nan, np.float32)
  for row, steps in zip(rows, series, strict=True):
    row[: len(steps)] = steps[:length]
  return rows


def from_arrays(
  arrays: list[np.ndarray], labels: np.ndarray, keys: np.ndarray
) -> Series:
  """Returns the split of series in memory.

  Args:
    arrays: series, [length, c] each.
    labels: classes, int32 [count].
    keys: identifiers, uint64 [count].
  """
  ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
  starts = np.concatenate([[0], ends[:-1]])
  values = np.concatenate(arrays).astype(np.float32)
  return Series(values, starts, ends, labels, keys)


def from_packed(packed: Packed, channels: int) -> Series:
  """Returns the split of series that are stored as flat sequences.

  Args:
    packed: sequences of the numbers of all steps, one step after another.
    channels: number of channels of a step.
  """
  return Series(
    packed.tokens.view(np.ndarray).reshape(-1, channels),
    packed.starts // channels,
    packed.stops // channels,
    packed.labels,
    packed.keys,
  )


def compute_statistics(
  split: Series,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns mean and deviation of each channel, without missing numbers.

  The deviation of a constant channel is 1.
  """
  values = np.concatenate(
    [split.values[a:b] for a, b in zip(split.starts, split.stops, strict=True)]
  ).astype(np.float64)
  is_number = np.isfinite(values)
  count = np.maximum(is_number.sum(0), 1)
  mean = np.where(is_number, values, 0).sum(0) / count
  square = np.where(is_number, (values - mean) ** 2, 0).sum(0) / count
  deviation = np.where(square > 0, np.sqrt(square), 1)
  return tuple(mean.tolist()), tuple(deviation.tolist())


def count_channels(split: Any) -> int:
  """Returns the number of channels of a split; 0 if it has no time series.

  Args:
    split: any split, also one with labels for tokens.
  """
  inputs = getattr(split, "inputs", split)
  return inputs.channels if isinstance(inputs, Series) else 0
