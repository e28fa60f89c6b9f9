import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.data import loader, packed


@given(
  size=st.integers(1, 40),
  batch_size=st.integers(1, 60),
  seed=st.integers(0, 9),
)
def test_every_epoch_is_a_permutation(size, batch_size, seed):
  order = loader.TrainOrder(size, batch_size, seed)
  steps = 2 * size
  stream = np.concatenate([order(step) for step in range(steps)])
  for epoch in range(len(stream) // size):
    part = stream[epoch * size : (epoch + 1) * size]
    assert sorted(part) == list(range(size))


def test_the_order_is_a_function_of_seed_and_step():
  one, two = (loader.TrainOrder(50, 8, seed=3) for _ in range(2))
  stream = [one(step) for step in range(30)]
  for step in (29, 3, 17, 0):
    np.testing.assert_array_equal(two(step), stream[step])
  other = loader.TrainOrder(50, 8, seed=4)
  assert not np.array_equal(other(0), stream[0])
  epochs = np.concatenate(stream)
  assert not np.array_equal(epochs[:50], epochs[50:100])


def test_nothing_to_train_on():
  with pytest.raises(ValueError, match="empty"):
    loader.TrainOrder(0, 8, seed=0)


@given(size=st.integers(1, 30), batch_size=st.integers(1, 12))
def test_evaluation_takes_every_example_once(size, batch_size):
  rows = [np.array([i + 1], np.uint8) for i in range(size)]
  split = packed.pack(rows, np.arange(size))
  seen = []
  for batch in loader.eval_batches(split, batch_size, 4):
    assert batch["inputs"].shape == (batch_size, 4)
    seen += batch["targets"][batch["weights"] > 0].tolist()
  assert seen == list(range(size))


def test_training_batches_weigh_one():
  split = packed.pack([np.array([7], np.uint8)], np.array([2]))
  batch = loader.train_batch(split, np.array([0, 0]), 3)
  assert batch["weights"].tolist() == [1, 1]
  assert batch["inputs"].tolist() == [[7, 0, 0]] * 2
