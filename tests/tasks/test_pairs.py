"""Planted pairs: what tells the classes apart, and what does not."""

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.tasks import inputs, pairs

SIZES = dict(num_train=60, num_validation=20, num_test=40)


def load(folder, **options):
  return tasks.get("planted_pairs", data_dir=str(folder), **SIZES, **options)


def test_pairs_task_has_the_distance_in_one_class_only(tmp_path):
  task = load(tmp_path)
  for split in task.splits.values():
    together = []
    for i in range(len(split)):
      ids = split[i]
      assert np.bincount(ids, minlength=4).tolist() == [0, 224, 16, 16]
      together.append(int((np.roll(ids, -19)[ids == 2] == 3).sum()))
    together = np.array(together)
    assert (together[split.labels == 1] == 16).all()
    assert (together[split.labels == 0] < 8).all()
  keys = [set(split.keys) for split in task.splits.values()]
  assert not set.intersection(*keys)


@pytest.mark.slow
def test_places_have_the_same_distribution_in_both_classes():
  """Chi-squared over places: 63 degrees of freedom, all four within 5 sigma."""
  rng = np.random.default_rng(0)
  for label in (0, 1):
    counts = np.zeros((2, 64))
    for _ in range(4_000):
      for kind, where in enumerate(pairs.places(rng, 64, 8, 5, label)):
        counts[kind, where] += 1
    for count in counts:
      expected = 4_000 * 8 / 64 * (1 - 8 / 64)
      chi = (np.square(count - count.mean()) / expected).sum()
      assert abs(chi - 63) < 5 * np.sqrt(2 * 63)


def test_pairs_task_baselines_are_near_chance(tmp_path):
  task = load(tmp_path, length=32, num_pairs=4, distance=3)
  assert task.max_len == 32
  for score in task.baselines().values():
    assert 0.25 < score < 0.75


def test_pairs_task_description_depends_on_the_seed(tmp_path):
  first, same, other = (
    load(tmp_path / name, seed=seed)
    for name, seed in (("a", 0), ("b", 0), ("c", 1))
  )
  assert first.description() == same.description()
  assert first.description() != other.description()


@pytest.mark.parametrize(
  "options", [{"distance": 256}, {"length": 20}, {"num_pairs": 65}]
)
def test_pairs_task_refuses_marks_that_do_not_fit(tmp_path, options):
  with pytest.raises(ValueError, match="num_pairs=.*length / 4"):
    load(tmp_path, **options)


def test_pairs_tokenizer_reads_marks_as_text(tmp_path):
  task = load(tmp_path)
  read = inputs.TOKENIZERS[task.tokenizer](task.vocabulary, "")
  assert read("a. .b").tolist() == [2, 1, 1, 3]
  with pytest.raises(ValueError, match=r"'c'.*\. a b"):
    read("a.c")
