"""Splits of time series: reading, padding, statistics."""

import numpy as np
import pytest

from jaxformers.data.engine import series

ARRAYS = [
  np.array([[1.0, np.nan], [3.0, 4.0], [5.0, 8.0]], np.float32),
  np.array([[7.0, 0.0]], np.float32),
]


def split(**fields):
  made = series.from_arrays(
    ARRAYS, np.array([1, 0], np.int32), np.arange(2, dtype=np.uint64)
  )
  return series.dataclasses.replace(made, **fields)


def test_batches_are_cut_and_padded_with_nan():
  batch = split().batch(np.array([1, 0]), 2)
  want = [[[7, 0], [np.nan, np.nan]], [[1, np.nan], [3, 4]]]
  np.testing.assert_array_equal(batch["inputs"], np.float32(want))
  assert batch["inputs"].dtype == np.float32
  assert batch["targets"].tolist() == [0, 1]
  assert split().lengths().tolist() == [3, 1]


def test_statistics_leave_out_missing_numbers():
  mean, deviation = series.compute_statistics(split())
  assert mean == (4.0, 4.0)
  np.testing.assert_allclose(deviation, [5**0.5, (32 / 3) ** 0.5])
  # Only the selected series count; a constant channel has the deviation 1.
  assert series.compute_statistics(split().select(np.array([1]))) == (
    (7.0, 0.0),
    (1.0, 1.0),
  )


def test_series_are_normalised_and_have_their_time():
  made = split(mean=(1.0, 4.0), deviation=(2.0, 4.0), include_time=True)
  assert made.channels == 3
  want = [[0, 0, np.nan], [1 / 3, 1, 0], [2 / 3, 2, 1]]
  np.testing.assert_allclose(made[0], np.float32(want))
  # A step without numbers has no time, so that it is masked.
  made.values[1] = np.nan
  assert np.isnan(made[0]).tolist() == [
    [False, False, True],
    [True] * 3,
    [False] * 3,
  ]


def test_series_without_numbers_are_refused():
  made = split()
  made.values[0] = np.nan
  series.require_numbers(made, "train", 2)
  with pytest.raises(ValueError, match="train.*first 1 steps at 0"):
    series.require_numbers(made, "train", 1)


def test_digests_depend_on_values_and_bounds():
  first = split()
  changed = first.values.copy()
  changed[3, 0] = 6
  others = [
    split(values=changed),
    split(stops=np.array([2, 4])),
    split(labels=np.array([0, 0], np.int32)),
  ]
  assert len({s.digest() for s in (first, *others)}) == 4
