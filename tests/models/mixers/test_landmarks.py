import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers import landmarks
from tests.models.mixers.oracle import tokens


def test_tokens_first_moves_tokens_to_the_front():
  order = landmarks.tokens_first(jnp.array([[False, True, False, True]]))
  assert order.tolist() == [[1, 3, 0, 2]]


def test_segments_average_tokens_in_near_equal_runs():
  mask = tokens()  # 12 tokens, and 8 with a hole.
  weights = landmarks.segments(jnp.asarray(mask), 4, jnp.float32)
  np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(weights[0], np.kron(np.eye(4), [1 / 3] * 3))
  assert not np.any(np.asarray(weights)[1][:, ~mask[1]])
  assert np.count_nonzero(weights[1], axis=-1).tolist() == [2, 2, 2, 2]


def test_segments_of_fewer_tokens_than_runs():
  weights = landmarks.segments(jnp.array([[True, False, True]]), 3, jnp.float32)
  assert weights[0].tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_iterative_inverse_converges_to_the_pseudo_inverse():
  a = np.random.default_rng(0).uniform(size=(2, 1, 5, 5)) + np.eye(5)
  a[1, 0, 3] = a[1, 0, :, 3] = 0
  z = landmarks.iterative_inverse(jnp.asarray(a, jnp.float32), 20)
  np.testing.assert_allclose(z, np.linalg.pinv(a), atol=1e-4)


def test_iterative_inverse_of_six_steps_is_the_released_code():
  a = np.random.default_rng(0).uniform(size=(2, 1, 5, 5))
  a = a / a.sum(-1, keepdims=True)
  z = a.swapaxes(-1, -2) / a.sum(-2).max()  # Of the whole batch.
  for _ in range(6):
    inner = 7 * np.eye(5) - a @ z
    inner = 15 * np.eye(5) - a @ z @ inner
    z = z @ (13 * np.eye(5) - a @ z @ inner) / 4
  got = landmarks.iterative_inverse(jnp.asarray(a, jnp.float32), 6, "batch")
  np.testing.assert_allclose(got, z, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  ("steps", "init", "message"),
  [
    (0, "sample", "inverse_steps=0"),
    (6, "head", "inverse_init.*'head'.*batch"),
  ],
)
def test_iterative_inverse_refuses_wrong_options(steps, init, message):
  with pytest.raises(ValueError, match=message):
    landmarks.iterative_inverse(jnp.eye(2)[None, None], steps, init)


def test_ranks_are_fractions_of_the_tokens():
  place = jnp.array([[0.0, 0.25, 0.999]])
  got = landmarks.ranks(place, jnp.array([[8], [3], [1], [0]]))
  assert got.tolist() == [[0, 2, 7], [0, 0, 2], [0, 0, 0], [0, 0, 0]]
