import numpy as np
import pytest

from jaxformers.data.engine.packed import pack
from jaxformers.tasks import splits


def numbered(count, keys=None):
  packed = pack([np.array([i % 200]) for i in range(count)], np.arange(count))
  if keys is not None:
    packed.keys[:] = keys
  return packed


def test_hold_out_depends_on_keys_only():
  rng = np.random.default_rng(0)
  keys = rng.permutation(100)
  parts = splits.hold_out(numbered(100, keys), 20)
  train, held = parts["train"], parts["validation"]
  assert sorted(held.keys) == list(range(80, 100))
  assert sorted([*train.labels, *held.labels]) == list(range(100))
  assert (np.diff(held.labels) > 0).all()  # In the order of the data.
  with pytest.raises(ValueError, match="100 examples.*100"):
    splits.hold_out(numbered(100), 100)
  for count in (0, -5):
    with pytest.raises(ValueError, match=f"{count} examples.*at least one"):
      splits.hold_out(numbered(100), count)


def test_hold_out_keeps_equal_texts_together():
  parts = splits.hold_out(numbered(100, np.arange(100) // 2), 20)
  assert not set(parts["train"].keys) & set(parts["validation"].keys)


def test_slices_are_those_of_tensorflow_datasets():
  parts = splits.slices(numbered(50_000), {"train": 90, "validation": 10})
  assert (len(parts["train"]), len(parts["validation"])) == (45_000, 5_000)
  assert parts["validation"].labels[0] == 45_000
  parts = splits.slices(
    numbered(11), {"train": 80, "validation": 10, "test": 10}
  )
  assert [len(part) for part in parts.values()] == [9, 1, 1]


def test_torch_permutation_is_that_of_pytorch():
  # torch.randperm(10, generator=torch.Generator().manual_seed(42))
  want = [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]
  assert splits.torch_permutation(10, 42).tolist() == want
  order = splits.torch_permutation(50_000, 42)
  assert sorted(order) == list(range(50_000))
  assert splits.torch_permutation(1, 0).tolist() == [0]
  assert splits.torch_permutation(0, 0).tolist() == []


def test_torch_random_draws_in_the_order_of_keys():
  keys = np.random.default_rng(1).permutation(10)
  parts = splits.torch_random(
    numbered(10, keys), {"validation": 0.1, "test": 0.29}
  )
  assert {name: part.keys.tolist() for name, part in parts.items()} == {
    "train": [2, 6, 1, 8, 4, 5, 0],
    "validation": [9],
    "test": [3, 7],
  }


def test_with_validation_holds_out_or_takes_the_test_split():
  train, test = numbered(20), numbered(6)
  held_out = splits.with_validation({"train": train, "test": test}, 4)
  assert {name: len(split) for name, split in held_out.items()} == {
    "train": 16,
    "test": 6,
    "validation": 4,
  }
  same = splits.with_validation({"train": train, "test": test}, 0)
  assert same["train"] is train
  assert same["validation"] is same["test"] is test
