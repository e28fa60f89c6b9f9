"""Order of the examples of a split, in memory and on disk."""

import random

import pytest

from jaxformers.data.engine import sorting

LAST = (1 << 128) - 1


@pytest.mark.parametrize("max_memory", [0, 50, 1 << 20])
def test_examples_are_sorted_by_their_keys(tmp_path, monkeypatch, max_memory):
  monkeypatch.setattr(sorting, "MAX_MEMORY", max_memory)
  rng = random.Random(0)
  keys = [0, 7, 1 << 118, LAST, *(rng.getrandbits(128) for _ in range(200))]
  rng.shuffle(keys)
  examples = [(key, rng.randbytes(rng.randrange(5))) for key in keys]
  sorter = sorting.ExampleSorter(tmp_path)
  for example in examples:
    sorter.add(*example)
  is_on_disk = any(tmp_path.iterdir())
  assert is_on_disk == (max_memory < 100)
  assert sorter.num_examples == len(examples)
  assert sorter.num_bytes == sum(len(data) for _, data in examples)
  assert list(sorter) == sorted(examples)
  assert not any(tmp_path.iterdir())


def test_the_disk_never_holds_a_split_twice(tmp_path, monkeypatch):
  monkeypatch.setattr(sorting, "MAX_MEMORY", 10)
  sorter = sorting.ExampleSorter(tmp_path)
  for place in range(64):
    sorter.add(place << 122, b"example")
  for place, (key, _) in enumerate(sorter):
    assert key == place << 122
    # The files of the examples that were yielded are gone.
    assert len([*tmp_path.iterdir()]) == 63 - place
