"""Random deletion of tokens, as certificates of edits need it."""

import dataclasses

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.engine.loader import Loader
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import arrays, deletion, reconstruction


def texts(count=400, least=1, most=120):
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 30, n) for n in rng.integers(least, most, count)]
  return rows, np.arange(count) % 3


def task_of(rate, **options):
  rows, labels = texts(**options)
  rows[0] = np.full(50, 29)
  return tasks.delete(arrays.from_arrays((rows, labels)), rate)


def is_subsequence(part, whole):
  rest = iter(whole)
  return all(token in rest for token in part)


def test_keep_moves_what_is_left_and_cuts_it():
  ids = np.array([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]], np.int32)
  kept = np.array([[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]], bool)
  want = [[5, 7], [0, 0], [1, 2]]
  np.testing.assert_array_equal(deletion.keep(ids, kept, 2), want)
  wide = deletion.keep(ids, kept, 5)
  np.testing.assert_array_equal(wide[2], [1, 2, 3, 4, 0])
  assert wide.dtype == np.int32


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_each_token_goes_with_the_same_probability(rate):
  """Every place alike, and independently: counts are binomial."""
  split = task_of(rate).splits["train"]
  whole = split.split
  numbers = np.arange(len(split))
  left = np.zeros(2)
  for step in range(200):
    batch = split.batch(numbers[:1], 60, (0, step, 0))
    row = batch["inputs"][0]
    left += [(row > 0).sum(), (row > 0).sum() ** 2]
  n = len(whole[0])
  mean, square = left / 200
  assert abs(mean - n * (1 - rate)) < 4 * np.sqrt(n * rate * (1 - rate) / 200)
  spread = square - mean**2
  want = n * rate * (1 - rate)
  assert 0.7 * want < spread < 1.4 * want


def test_what_is_left_is_a_subsequence_and_is_drawn_anew_in_training():
  split = task_of(0.5).splits["train"]
  numbers = np.arange(12, 30)
  first, second, again = (
    split.batch(numbers, 120, key)["inputs"]
    for key in ((0, 1, 0), (0, 2, 0), (0, 1, 0))
  )
  np.testing.assert_array_equal(first, again)
  assert (first != second).any()
  for row, k in zip(first, numbers, strict=True):
    assert is_subsequence(row[row > 0], split.split[k])
  np.testing.assert_array_equal(
    split.batch(numbers, 120)["targets"], split.split.labels[numbers]
  )


def test_deletions_do_not_depend_on_the_number_of_processes():
  split = task_of(0.5).splits["train"]
  whole = split.batch(np.arange(6), 120, (0, 1, 4))["inputs"]
  second = split.batch(np.arange(3, 6), 120, (0, 1, 7))["inputs"]
  np.testing.assert_array_equal(whole[3:], second)


def test_evaluation_depends_on_the_example_alone():
  split = task_of(0.7).splits["train"]
  together = split.batch(np.arange(9), 60)["inputs"]
  alone = [split.batch(np.array([k]), 60)["inputs"] for k in range(9)]
  np.testing.assert_array_equal(together, np.concatenate(alone))
  wide = split.batch(np.arange(9), 80)["inputs"]
  np.testing.assert_array_equal(wide[:, :60], together)


def test_lengths_are_hardly_exceeded_and_shorten_the_batches():
  task = task_of(0.9, least=100, count=600)
  split = task.splits["train"]
  assert task.max_len == deletion.left(120 - 1, 0.9) == 25
  exceeded = 0
  for step in range(30):
    rows = split.batch(np.arange(len(split)), 120, (0, step, 0))["inputs"]
    exceeded += ((rows > 0).sum(1) > split.lengths()).sum()
  # A normal distribution has 3e-5 beyond four deviations; a binomial one is
  # skewed.
  assert exceeded < 30 * len(split) * 1e-3
  batch = Loader(split, (task.max_len,)).batch(np.arange(8), (0, 0))
  assert batch["inputs"].shape == (8, 25)


def test_a_task_says_that_it_deletes():
  task = task_of(0.9)
  assert "deletion 0.9" in task.protocol
  assert task.description()["deletion"] == 0.9


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("marked", "ids that open or close"),
    ("pairs", "another task"),
  ],
)
def test_other_tasks_are_refused(name, message):
  task = arrays.from_arrays(texts())
  if name == "marked":
    splits = {
      key: dataclasses.replace(split, end=2)
      for key, split in task.splits.items()
    }
    task = dataclasses.replace(task, splits=splits)
  else:
    task = dataclasses.replace(task, num_inputs=2)
  with pytest.raises(UserError, match=message):
    tasks.delete(task, 0.5)


def test_deletion_and_pretraining_are_not_combined():
  task = reconstruction.reconstruct(arrays.from_arrays(texts()), "causal")
  with pytest.raises(UserError, match="another task"):
    tasks.delete(task, 0.5)
  with pytest.raises(UserError, match=r"deletion=1.5"):
    tasks.delete(arrays.from_arrays(texts()), 1.5)


def test_the_option_is_checked_before_data_are_read():
  with pytest.raises(UserError, match=r"deletion=1.0.*\[0, 1\)"):
    tasks.check_ranges("listops", {"deletion": 1.0}, "config.task")
