import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers import linear
from tests.models.mixers.oracle import agree, heads, tokens


def by_kernel(weights, v, seen):
  weights = np.where(seen, weights, 0)
  return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_its_formula(causal):
  n = 2 * linear.CHUNK + 3 if causal else 12
  q, k, v = heads(n=n)
  phi_q, phi_k = (
    np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (q, k)
  )
  seen = tokens(n)[:, None, None]
  if causal:
    seen = seen & np.tril(np.ones((n, n), bool))
  want = by_kernel(phi_q @ phi_k.swapaxes(-1, -2), v, seen)
  agree(linear.linear, (q, k, v), want, causal=causal)


def test_elu_and_one_is_accurate_far_below_zero():
  x = jnp.array([-30.0, -12.3, -0.1, 0.0, 2.0])
  want = [np.exp(-30.0), np.exp(-12.3), np.exp(-0.1), 1.0, 3.0]
  np.testing.assert_allclose(linear.elu_and_one(x), want, rtol=1e-6)


def test_by_features_is_exact_for_a_finite_kernel():
  """Exact where the kernel has finite features: (q . k)^2 of two channels."""
  q, k, v = heads(e=2)

  def features(x):
    squares = [x[..., 0] ** 2, x[..., 1] ** 2]
    return np.stack([*squares, 2**0.5 * np.abs(x[..., 0] * x[..., 1])], -1)

  want = by_kernel(features(q) @ features(k).swapaxes(-1, -2), v, True)
  y = linear.by_features(
    *(jnp.asarray(a, jnp.float32) for a in (features(q), features(k), v)),
    causal=False,
  )
  np.testing.assert_allclose(y, want, atol=5e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_small_features_are_finite(causal):
  """They do not depend on a factor of the features of the keys."""
  q, k, v = (jnp.asarray(a, jnp.float32) for a in heads(e=2))
  q, k = jnp.abs(q), jnp.abs(k)

  def slopes(q, k):
    def loss(q, v):
      return (linear.by_features(q, k, v, causal=causal) ** 2).sum()

    return jax.grad(loss, (0, 1))(q, v)

  dq, dv = slopes(1e-10 * q, 1e-12 * k)
  want_q, want_v = slopes(q, k)
  np.testing.assert_allclose(1e-10 * dq, want_q, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(dv, want_v, rtol=1e-3, atol=1e-5)


def test_by_features_without_keys_is_zero():
  q = jnp.ones((1, 1, 3, 2))
  y = linear.by_features(q, 0 * q, q, causal=False)
  np.testing.assert_array_equal(y, np.zeros((1, 1, 3, 2)))
