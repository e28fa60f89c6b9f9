import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.performer import orthogonal_features, performer
from tests.models.mixers.oracle import (
  E,
  H,
  N,
  agree,
  dense,
  given,
  heads,
  tokens,
)

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_features": 8}


def estimate(q, k, v, w, seen, epsilon=0.0, mask=None):
  q, k = q * E**-0.25, k * E**-0.25
  by_q, by_k = (x @ w.swapaxes(-1, -2) for x in (q, k))
  half_q, half_k = (np.square(x).sum(-1, keepdims=True) / 2 for x in (q, k))
  if epsilon:  # As released: stabilised by the maximum of w x alone.
    keys = np.where(mask[:, None, :, None], by_k, -np.inf)
    half_q = half_q + by_q.max(-1, keepdims=True)
    half_k = half_k + keys.max((-1, -2), keepdims=True)
  phi_q, phi_k = (
    np.exp(by_q - half_q) + epsilon,
    np.exp(by_k - half_k) + epsilon,
  )
  weights = np.where(seen, phi_q @ phi_k.swapaxes(-1, -2), 0)
  return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_its_formula(causal):
  n = 40 if causal else N  # Three chunks, the last cut.
  q, k, v = heads(n=n)
  w = np.random.default_rng(1).normal(size=(H, 7, E))
  seen = tokens(n)[:, None, None]
  if causal:
    seen = seen & np.tril(np.ones((n, n), bool))
  want = estimate(q, k, v, w, seen)
  draw = given(features=w)
  agree(performer, (q, k, v), want, draw=draw, num_features=7, causal=causal)


def test_performer_with_the_released_epsilon_is_its_formula():
  q, k, v = heads()
  w = np.random.default_rng(1).normal(size=(H, 7, E))
  mask = tokens()
  want = estimate(q, k, v, w, mask[:, None, None], 1e-4, mask)
  options = {"draw": given(features=w), "num_features": 7, "epsilon": 1e-4}
  agree(performer, (q, k, v), want, **options)


def test_performer_error_falls_with_more_features():
  q, k, v = heads(n=32)
  q, k = q / 2, k / 2  # The variance grows as exp(|q + k|^2).
  mask = np.ones((2, 32), bool)
  want = dense(q, k, v, mask[:, None])

  def error(count):
    def once(seed):
      y = performer(
        *(jnp.asarray(a, jnp.float32) for a in (q, k, v)),
        mask=jnp.asarray(mask),
        draw=lambda _, make: make(jax.random.key(seed)),
        num_features=count,
      )
      return np.square(y - want).mean()

    return np.mean([once(seed) for seed in range(4)]) ** 0.5

  few, some, many = (error(count) for count in (16, 256, 4096))
  assert many < 0.5 * some
  assert some < 0.5 * few
  assert many < 0.1 * np.std(want)


def test_performer_of_large_keys_neither_overflows_nor_vanishes():
  q, k, v = (jnp.asarray(20 * a, jnp.float32) for a in heads())
  w = jnp.asarray(np.random.default_rng(1).normal(size=(H, 7, E)), jnp.float32)
  y = performer(
    q, k, v, mask=jnp.asarray(tokens()), draw=given(features=w), num_features=7
  )
  assert jnp.isfinite(y).all()
  assert (jnp.abs(y).max(2) > 0.1).all()


def test_performer_causal_sums_do_not_depend_on_later_keys():
  """Keys whose exponents are hundreds above those before them."""
  q, k, v = (jnp.asarray(a, jnp.float32) for a in heads(n=40))
  w = jnp.asarray(np.random.default_rng(1).normal(size=(H, 7, E)), jnp.float32)
  call = functools.partial(
    performer,
    mask=jnp.ones((2, 40), bool),
    draw=given(features=w),
    num_features=7,
    causal=True,
  )
  y = call(8 * q, 8 * k, v)
  np.testing.assert_allclose(y[:, :, 0], v[:, :, 0], atol=1e-5)
  for at in (5, 16, 30):
    z = call(8 * q, (8 * k).at[:, :, at:].multiply(12), v)
    np.testing.assert_allclose(y[:, :, :at], z[:, :, :at], atol=1e-5)
    assert jnp.abs(y - z)[:, :, at + 1 :].max() > 0.1


def test_orthogonal_features_are_orthogonal_in_blocks_with_normal_norms():
  w = orthogonal_features(jax.random.key(0), 3, 10, 4)
  assert w.shape == (3, 10, 4)
  for at in (slice(0, 4), slice(4, 8), slice(8, 10)):
    gram = np.asarray(w[:, at] @ w[:, at].swapaxes(1, 2))
    off = gram[:, ~np.eye(gram.shape[-1], dtype=bool)]
    np.testing.assert_allclose(off, 0, atol=1e-5)
  w = orthogonal_features(jax.random.key(1), 1, 20_000, 4)[0]
  np.testing.assert_allclose(np.cov(w.T), np.eye(4), atol=0.05)
  np.testing.assert_allclose(w.mean(0), 0, atol=0.05)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_features": 0}, "num_features=0"),
    ({"epsilon": -1.0}, "epsilon=-1.0"),
    ({"epsilon": 1e-4, "causal": True}, "epsilon=0.0001.*causal=True"),
  ],
)
def test_performer_refuses_wrong_options(options, message):
  x = jnp.ones((1, 1, 4, 2))
  call = functools.partial(performer, x, x, x, draw=None)
  with pytest.raises(ValueError, match=message):
    call(mask=jnp.ones((1, 4), bool), **options)
