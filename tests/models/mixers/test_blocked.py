import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers import blocked


def test_merge_undoes_split():
  x = jnp.arange(14.0).reshape(1, 1, 7, 2)
  cut = blocked.split(x, 3)
  assert cut.shape == (1, 1, 3, 3, 2)
  np.testing.assert_array_equal(cut[0, 0, 2, 1:], np.zeros((2, 2)))
  np.testing.assert_array_equal(blocked.merge(cut, 7), x)


def test_neighbours_pad_the_ends_with_zeros():
  x = jnp.arange(1, 7).reshape(3, 2)  # Three blocks of two.
  around = blocked.neighbours(x, 1, 1, 0)
  assert around.tolist() == [
    [0, 0, 1, 2, 3, 4],
    [1, 2, 3, 4, 5, 6],
    [3, 4, 5, 6, 0, 0],
  ]


def test_attend_to_shares_a_softmax_over_block_and_global_keys():
  q, k, v = (
    jnp.asarray(a)
    for a in np.random.default_rng(0).normal(size=(3, 1, 1, 2, 3, 4))
  )
  seen = jnp.ones((1, 1, 1, 1, 3), bool)
  shared = blocked.Keys(k[:, :, :1], v[:, :, :1], seen)
  y = blocked.attend_to(q, [blocked.Keys(k, v, seen), shared], Dropout())
  for block in range(2):
    keys = np.concatenate([k[0, 0, block], k[0, 0, 0]])
    values = np.concatenate([v[0, 0, block], v[0, 0, 0]])
    weights = np.exp(q[0, 0, block] @ keys.T / 2)
    want = weights / weights.sum(-1, keepdims=True) @ values
    np.testing.assert_allclose(y[0, 0, block], want, atol=1e-5)


def test_check_size_refuses_an_empty_block():
  with pytest.raises(ValueError, match="block_size=0"):
    blocked.check_size("block_size", 0)
