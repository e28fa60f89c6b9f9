import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.data.engine import loader, packed

LENGTHS = np.random.default_rng(0).integers(1, 50, 200)


@given(
  size=st.integers(1, 40),
  batch_size=st.integers(1, 60),
  seed=st.integers(0, 9),
)
def test_train_order_is_a_permutation_in_every_epoch(size, batch_size, seed):
  order = loader.TrainOrder(size, batch_size, seed)
  steps = 2 * size
  stream = np.concatenate([order(step) for step in range(steps)])
  for epoch in range(len(stream) // size):
    part = stream[epoch * size : (epoch + 1) * size]
    assert sorted(part) == list(range(size))


@given(batch_size=st.integers(1, 13), seed=st.integers(0, 9))
def test_train_order_by_length_sees_every_example_once_an_epoch(
  batch_size, seed
):
  lengths = LENGTHS[: 4 * loader.WINDOW * batch_size // 3]
  order = loader.TrainOrder(len(lengths), batch_size, seed, lengths)
  windows = 12  # About nine epochs.
  stream = [order(step) for step in range(windows * loader.WINDOW)]
  seen = np.bincount(np.concatenate(stream), minlength=len(lengths))
  assert np.ptp(seen) <= 2  # A window may reach into the next epoch.
  spread = np.mean([np.ptp(lengths[batch]) for batch in stream])
  random = loader.TrainOrder(len(lengths), batch_size, seed)
  mixed = np.mean([np.ptp(lengths[random(s)]) for s in range(len(stream))])
  assert spread <= mixed / 3


@pytest.mark.parametrize("lengths", [None, LENGTHS[:50]])
def test_train_order_is_a_function_of_seed_and_step(lengths):
  first, second = (loader.TrainOrder(50, 8, 3, lengths) for _ in range(2))
  stream = [first(step) for step in range(60)]
  for step in (59, 3, 17, 0, 40):
    np.testing.assert_array_equal(second(step), stream[step])
  other = loader.TrainOrder(50, 8, 4, lengths)
  assert not np.array_equal(other(0), stream[0])
  epochs = np.concatenate(stream)
  assert not np.array_equal(epochs[:50], epochs[50:100])


def test_train_order_refuses_an_empty_split():
  with pytest.raises(ValueError, match="split is empty"):
    loader.TrainOrder(0, 8, seed=0)


def test_pad_lengths_divide_the_greatest_length():
  assert loader.pad_lengths(4_000, 4) == (1_000, 2_000, 3_000, 4_000)
  assert loader.pad_lengths(10, 3) == (4, 7, 10)
  assert loader.pad_lengths(7, 1) == (7,)
  assert loader.pad_lengths(2, 9) == (1, 2)
  assert loader.pad_lengths(8, 2, 2) == (1, 2, 4, 8)
  assert loader.pad_lengths(8, 2, 8) == loader.pad_lengths(8, 2) == (4, 8)
  assert loader.fitting(1_000, (1_000, 2_000)) == 1_000
  assert loader.fitting(1_001, (1_000, 2_000)) == 2_000
  assert loader.fitting(5_000, (1_000, 2_000)) == 2_000
  with pytest.raises(ValueError, match="buckets=0"):
    loader.pad_lengths(8, 0)


def splits(count):
  rng = np.random.default_rng(count)
  rows = [
    np.full(length, i + 1, np.uint8)
    for i, length in enumerate(rng.integers(1, 30, count))
  ]
  return packed.pack(rows, np.arange(count))


@given(
  size=st.integers(1, 30),
  batch_size=st.integers(1, 12),
  buckets=st.integers(1, 4),
)
def test_loader_all_takes_every_example_once(size, batch_size, buckets):
  lengths = loader.pad_lengths(20, buckets)
  seen = []
  for batch in loader.Loader(splits(size), lengths).all(batch_size):
    assert batch["inputs"].shape[0] == batch_size
    assert batch["inputs"].shape[1] in lengths
    real = batch["weights"] > 0
    seen += batch["targets"][real].tolist()
    assert (batch["inputs"][real, 0] == batch["targets"][real] + 1).all()
  assert sorted(seen) == list(range(size))


def test_loader_batch_is_padded_to_the_next_bucket():
  split = splits(20)
  all_of = loader.Loader(split, (8, 16, 24))
  for indices in (np.array([0, 1]), np.arange(20)):
    batch = all_of.batch(indices)
    longest = split.lengths()[indices].max()
    assert batch["inputs"].shape[1] == loader.fitting(longest, (8, 16, 24))
    assert batch["weights"].tolist() == [1] * len(indices)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_loader_of_a_process_reads_only_its_rows(processes):
  split = splits(20)
  order = loader.Loader(split, (10, 30)).order(8, seed=0)
  for step in range(20):
    complete = loader.Loader(split, (10, 30)).batch(order(step))
    parts = [
      loader.Loader(split, (10, 30), p, processes).batch(order(step))
      for p in range(processes)
    ]
    for key, value in complete.items():
      together = np.concatenate([part[key] for part in parts])
      np.testing.assert_array_equal(together, value)


@pytest.mark.parametrize("lengths", [(60,), (10, 30, 60)])
def test_order_begins_with_short_examples(lengths):
  split = splits(40)
  longest = split.lengths()
  limit = int(np.median(longest))
  reader = loader.Loader(split, lengths)
  order = reader.order(4, seed=0, short_steps=30, short_length=limit)
  first = np.concatenate([order(step) for step in range(30)])
  assert set(first) == set(np.flatnonzero(longest <= limit))
  # All later steps are those without short steps, for the same lengths.
  every = reader.order(4, seed=0)
  for step in (0, 7, 40):
    np.testing.assert_array_equal(order(30 + step), every(step))


def test_batches_whose_examples_are_compared_are_random():
  split = splits(40)
  plain = loader.Loader(split, (60,)).order(4, seed=0)
  mixed = loader.Loader(split, (10, 30, 60), is_sorted=False)
  order = mixed.order(4, seed=0)
  for step in range(20):
    np.testing.assert_array_equal(order(step), plain(step))
  # They are padded to several lengths all the same.
  short = np.argsort(split.lengths())[:2]
  assert mixed.batch(short)["inputs"].shape[1] < 60


def test_order_without_short_examples_is_refused():
  split = splits(5)
  least = split.lengths().min()
  reader = loader.Loader(split, (60,))
  with pytest.raises(ValueError, match=f"short_length=0.*has {least} tokens"):
    reader.order(4, seed=0, short_steps=3)


def test_prefetch_keeps_order_works_ahead_and_stops():
  computed = []
  gate = threading.Event()

  def make(key):
    computed.append(key)
    if key == 2:
      gate.set()
    return key * 10

  ahead = loader.prefetch(make, iter(range(100)), ahead=2)
  assert next(ahead) == 0
  assert gate.wait(5)  # Two more were asked for before anybody wanted them.
  assert [next(ahead) for _ in range(5)] == [10, 20, 30, 40, 50]
  ahead.close()
  assert max(computed) < 10
  assert list(loader.prefetch(make, iter(range(7)))) == list(range(0, 70, 10))


def test_prefetch_passes_errors_on():
  def make(key):
    if key == 3:
      raise ValueError("batch three")
    return key

  ahead = loader.prefetch(make, iter(range(9)))
  assert [next(ahead) for _ in range(3)] == [0, 1, 2]
  with pytest.raises(ValueError, match="batch three"):
    next(ahead)
