"""Activations are their formulas, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.activations import elu


def test_elu_is_its_formula_and_its_gradient():
  x = np.concatenate([np.linspace(-100, 100, 4001), [-1e-9, 0, 1e-9]])
  y, pull = jax.vjp(elu, jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(
    y, np.where(x > 0, x, np.expm1(np.minimum(x, 0))), rtol=1e-6, atol=1e-7
  )
  (g,) = pull(jnp.ones_like(y))
  np.testing.assert_allclose(g, np.exp(np.minimum(x, 0)), atol=1e-6)
  _, tangent = jax.jvp(elu, (jnp.asarray(x),), (jnp.ones(x.shape),))
  np.testing.assert_allclose(tangent, g, atol=1e-6)
  assert np.isnan(elu(jnp.float32(jnp.nan)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_once(dtype):
  x = jnp.linspace(-3, 3, 301).astype(dtype)
  y = elu(x)
  assert y.dtype == dtype
  want = jnp.expm1(jnp.minimum(x.astype(jnp.float32), 0))
  want = jnp.where(x > 0, x.astype(jnp.float32), want).astype(dtype)
  np.testing.assert_array_equal(y, want)


def test_only_what_elu_puts_out_is_kept_for_its_gradient():
  kept = jax.tree.leaves(jax.vjp(elu, jnp.linspace(-1, 1, 7))[1])
  arrays = [a for a in kept if a.shape == (7,)]
  (slope,) = arrays
  np.testing.assert_allclose(
    slope, 1 + np.minimum(elu(jnp.linspace(-1, 1, 7)), 0)
  )
