"""Sums and maxima over the tokens of padded sequences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import reductions


def test_masked_max_and_masked_mean_by_hand():
  x = jnp.array([[[1.0, -5.0], [3.0, -7.0], [100.0, 100.0]]])
  mask = jnp.array([[True, True, False]])
  chex.assert_trees_all_equal(
    reductions.masked_max(x, mask), jnp.array([[3.0, -5.0]])
  )
  chex.assert_trees_all_equal(
    reductions.masked_mean(x, mask), jnp.array([[2.0, -6.0]])
  )


def test_largest_has_a_gradient_without_optimisations_of_the_compiler():
  # The compiler then computes the moduli twice, with different rounding.
  rng = np.random.default_rng(2)
  x = jnp.asarray(rng.normal(size=(16, 128)).astype(np.float32))

  def gain(x):
    return reductions.largest(jnp.abs(jnp.fft.rfft(x)))

  np.testing.assert_array_equal(gain(x), jnp.abs(jnp.fft.rfft(x)).max(-1))
  slope = jax.jit(jax.grad(lambda x: gain(x).sum()))
  options = {"xla_backend_optimization_level": 0}
  plain = slope.lower(x).compile(compiler_options=options)(x)
  np.testing.assert_allclose(plain, slope(x), atol=1e-5)
  # A gain of a sequence times 1 + h is larger by h.
  np.testing.assert_allclose((plain * x).sum(-1), gain(x), rtol=1e-5)


@pytest.mark.parametrize("n", [40, 64, 96])  # In blocks, and not.
@pytest.mark.parametrize("on_tpu", [False, True])
@pytest.mark.slow
def test_masked_max_gradient_goes_to_the_first_maximum(n, on_tpu, monkeypatch):
  monkeypatch.setattr(reductions.platforms, "on_tpu", lambda: on_tpu)
  x = np.random.default_rng(n).integers(0, 4, (3, n, 5)).astype(np.float32)
  mask = jnp.arange(n)[None] < jnp.array([[n], [n - 3], [0]])
  top, pull = jax.vjp(lambda x: reductions.masked_max(x, mask), x)
  (g,) = pull(jnp.ones_like(top))
  want = np.zeros_like(x)
  for b, length in enumerate([n, n - 3]):
    np.put_along_axis(want[b], x[b, :length].argmax(0)[None], 1.0, 0)
    np.testing.assert_array_equal(top[b], x[b, :length].max(0))
  np.testing.assert_array_equal(g, want)


@pytest.mark.parametrize("n", [40, 64])
def test_masked_max_of_a_sum_has_one_gradient_on_every_device(n, monkeypatch):
  rng = np.random.default_rng(n)
  # Integers, so that several tokens have the maximum.
  x, f = (rng.integers(0, 3, (3, n, 5)).astype(np.float32) for _ in range(2))
  mask = jnp.arange(n)[None] < jnp.array([[n], [n - 3], [0]])
  weights = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
  slopes = []
  for on_tpu in (False, True):
    monkeypatch.setattr(reductions.platforms, "on_tpu", lambda on=on_tpu: on)
    value, pull = jax.vjp(
      lambda x, a, f: reductions.masked_max_of_sum(x, a, f, mask),
      *(x, jnp.float32(0.5), f),
    )
    np.testing.assert_array_equal(value[2], 0)
    slopes.append((value, pull(weights)))
  chex.assert_trees_all_close(*slopes, rtol=1e-6)
  assert float(jnp.abs(slopes[0][1][1])) > 0  # The gradient of a.
  x[0, 1, 2] = np.nan
  tops, _ = jax.jvp(
    lambda x: reductions.masked_max_of_sum(x, jnp.float32(0.5), f, mask),
    *((x,), (x,)),
  )
  assert jnp.isnan(tops[0, 2]) and jnp.isfinite(tops).sum() == tops.size - 1
