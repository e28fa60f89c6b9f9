"""Examples of a batch in rows of one length."""

import itertools

import numpy as np
import pytest

from jaxformers.data.engine import packed
from jaxformers.data.engine.loader import Loader
from jaxformers.data.engine.packing import Packing, plan

LENGTHS = np.array([4, 9, 2, 7, 5, 1, 9, 3])


def split():
  rng = np.random.default_rng(0)
  sequences = [rng.integers(1, 200, n).astype(np.uint8) for n in LENGTHS]
  return packed.pack(sequences, np.arange(8) % 3)


def test_first_fit_puts_the_longest_examples_first():
  packing = Packing(10, 3)
  rows = packing.deal(LENGTHS)
  # 9 and 1, 9, 7 and 3, 5 and 4, 2.
  assert rows == [[1, 5], [6], [3, 7], [4, 0], [2]]
  assert Packing(10, 3, unit=4).deal(LENGTHS)[5:] == [[], [], []]
  # At most `most` examples share a row.
  assert Packing(10, 1).deal(LENGTHS) == [
    [k] for k in np.argsort(-LENGTHS, kind="stable")
  ]


def test_a_plan_allows_twice_as_many_examples_as_fit_on_average():
  assert plan(LENGTHS, 10, 32, 2) == Packing(10, 4, 2)
  assert plan(LENGTHS, 1_000, 6).most == 6
  # Longer examples are cut.
  assert plan(np.array([50]), 10, 32).most == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_packed_batches_hold_every_example_once(processes):
  source, indices = split(), np.array([7, 1, 4, 0, 6, 3])
  packing = Packing(10, 3, unit=2)
  parts = [
    Loader(source, (10,), k, processes, packing).batch(indices)
    for k in range(processes)
  ]
  batch = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
  assert {k: v.shape for k, v in batch.items()} == {
    "inputs": (4, 10),
    "segments": (4, 10),
    "targets": (4, 3),
    "weights": (4, 3),
  }
  found = {}
  for row, numbers in enumerate(batch["segments"]):
    # Numbers follow each other, and padding is at the end.
    runs = [k for k, _ in itertools.groupby(numbers)]
    count = numbers.max()
    assert runs in ([*range(1, count + 1)], [*range(1, count + 1), 0])
    assert batch["weights"][row].tolist() == [k < count for k in range(3)]
    for number in range(1, count + 1):
      tokens = batch["inputs"][row, numbers == number]
      found[tokens.tobytes()] = batch["targets"][row, number - 1]
  want = {source[k].tobytes(): source.labels[k] for k in indices}
  assert found == want


def test_arrays_of_tokens_are_packed_like_inputs():
  fields = {
    "inputs": np.array([[1, 2, 3], [4, 5, 0]]),
    "weights": np.array([[1, 0, 1], [1, 1, 0]], np.float32),
  }
  batch = Packing(6, 2).batch([[1, 0]], np.array([3, 2]), fields)
  assert batch["inputs"].tolist() == [[4, 5, 1, 2, 3, 0]]
  assert batch["weights"].tolist() == [[1, 1, 1, 0, 1, 0]]
  assert batch["segments"].tolist() == [[1, 1, 2, 2, 2, 0]]
