import numpy as np
import pytest

from jaxformers.data import packed


def example():
  rows = [np.array(r, np.uint8) for r in ([3, 1, 2], [5], [4, 4, 9, 1])]
  return packed.pack(rows, np.array([0, 1, 2]))


def test_a_batch_is_cut_padded_and_shifted():
  split = example()
  batch = split.batch(np.array([2, 1]), 3)
  assert batch["inputs"].tolist() == [[4, 4, 9], [5, 0, 0]]
  assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
  assert batch["targets"].tolist() == [2, 1]
  shifted = packed.Packed(split.tokens, split.offsets, split.labels, shift=1)
  assert shifted.batch(np.array([1]), 3)["inputs"].tolist() == [[6, 0, 0]]
  assert shifted[0].tolist() == [4, 2, 3]


def test_the_largest_byte_survives_the_shift():
  split = packed.pack([np.array([255], np.uint8)], np.array([0]))
  shifted = packed.Packed(split.tokens, split.offsets, split.labels, shift=1)
  assert shifted.batch(np.array([0]), 1)["inputs"].tolist() == [[256]]


def test_select_and_drop():
  split = example()
  chosen = packed.select(split, np.array([2, 0]))
  assert [chosen[i].tolist() for i in range(2)] == [[4, 4, 9, 1], [3, 1, 2]]
  assert chosen.labels.tolist() == [2, 0]
  less = packed.drop(split, 4)
  assert [less[i].tolist() for i in range(3)] == [[3, 1, 2], [5], [9, 1]]
  none = packed.drop(packed.drop(split, 5), 3)
  assert [none[i].tolist() for i in range(3)] == [[1, 2], [], [4, 4, 9, 1]]


def test_build_makes_once_and_maps_from_disk(tmp_path):
  calls = []

  def make():
    calls.append(1)
    return {"train": example()}, {"source": "here"}

  for _ in range(2):
    splits, info = packed.build(tmp_path / "a" / "b", make)
  assert len(calls) == 1
  assert info == {"source": "here", "splits": {"train": 3}}
  assert isinstance(splits["train"].tokens, np.memmap)
  assert splits["train"][2].tolist() == [4, 4, 9, 1]


def test_a_failure_leaves_nothing_behind(tmp_path):
  def make():
    raise ValueError("truncated")

  with pytest.raises(ValueError, match="truncated"):
    packed.build(tmp_path / "a", make)
  assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_agree(tmp_path):
  def make():
    if not (tmp_path / "a").exists():  # The other one is faster.
      packed.build(tmp_path / "a", make_other)
    return make_other()

  def make_other():
    (tmp_path / "a").exists()
    return {"train": example()}, {}

  splits, _ = packed.build(tmp_path / "a", make)
  assert len(splits["train"]) == 3
  assert [path.name for path in tmp_path.iterdir()] == ["a"]
