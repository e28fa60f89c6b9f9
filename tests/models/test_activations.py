"""Activations are their formulas, forwards and backwards."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxformers.models.activations import ACTIVATIONS, SLOPES, elu, gelu
from tests.marks import slow_except


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
@pytest.mark.parametrize("function", [elu, gelu])
def test_activations_round_half_precision_once(function, dtype):
  x = jnp.linspace(-3, 3, 301).astype(dtype)
  y = function(x)
  assert y.dtype == dtype
  want = function(x.astype(jnp.float32)).astype(dtype)
  np.testing.assert_array_equal(y, want)
  assert jax.grad(function)(x[0]).dtype == dtype


@pytest.mark.parametrize("function", [elu, gelu])
def test_activations_store_only_the_slope_for_the_gradient(function):
  x = jnp.linspace(-1, 1, 7)
  kept = jax.tree.leaves(jax.vjp(function, x)[1])
  (slope,) = [a for a in kept if a.shape == (7,)]
  np.testing.assert_allclose(slope, jax.vmap(jax.grad(function))(x))


def test_gelu_is_its_formula_and_its_gradient():
  x = np.linspace(-40, 40, 4001)
  y, pull = jax.vjp(gelu, jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(y, x * scipy.stats.norm.cdf(x), atol=2e-6)
  (g,) = pull(jnp.ones_like(y))
  slope = scipy.stats.norm.cdf(x) + x * scipy.stats.norm.pdf(x)
  np.testing.assert_allclose(g, slope, atol=2e-6)
  assert np.isnan(gelu(jnp.float32(jnp.nan)))


@pytest.mark.parametrize(
  "dtype", slow_except([jnp.float32], [jnp.float32, jnp.bfloat16, jnp.float16])
)
@pytest.mark.parametrize("name", sorted({*ACTIVATIONS, "elu"}))
def test_activations_and_slopes_are_finite_for_all_numbers(name, dtype):
  function = {**ACTIVATIONS, "elu": elu}[name]
  top = jnp.finfo(dtype)
  powers = np.geomspace(float(top.tiny), 0.999 * float(top.max), 300)
  x = jnp.asarray(np.concatenate([-powers[::-1], [0], powers]), dtype)
  y, slope = jax.vmap(jax.value_and_grad(function))(x)
  chex.assert_tree_all_finite((x, y, slope))
  # Far from 0 an activation is a line on each side.
  assert abs(y[-1] - slope[-1] * x[-1]) <= 1
  assert abs(slope[0]) < 1e-6


def test_gelu_tanh_is_its_formula_and_its_gradient():
  x = jnp.linspace(-30, 30, 4001)
  found, want = (
    jax.vmap(jax.value_and_grad(function))(x)
    for function in (ACTIVATIONS["gelu_tanh"], nn.gelu)
  )
  chex.assert_trees_all_close(found, want, atol=2e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.slow
def test_slopes_are_the_greatest_slopes_rounded_up(name):
  x = jnp.linspace(-6, 6, 20_001)
  slopes = jax.vmap(jax.grad(ACTIVATIONS[name]))(x)
  assert SLOPES[name] - 0.01 < jnp.abs(slopes).max() <= SLOPES[name]
