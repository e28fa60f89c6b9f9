"""LayerNorm, beside Linen's."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxformers.models import parallel
from jaxformers.models.norm import LayerNorm


@pytest.mark.parametrize("is_cpu", [True, False])
def test_it_is_linens_in_value_and_gradient(monkeypatch, is_cpu):
  monkeypatch.setattr(parallel, "on_one_cpu", lambda: is_cpu)
  keys = jax.random.split(jax.random.key(0), 4)
  x = 3 + 2 * jax.random.normal(keys[0], (2, 5, 6))
  params = {"scale": jax.random.normal(keys[1], (6,))}
  params["bias"] = jax.random.normal(keys[2], (6,))
  slope = jax.random.normal(keys[3], x.shape)

  def loss(norm, params, x):
    return (norm.apply({"params": params}, x) * slope).sum()

  ours, linens = LayerNorm(1e-5), nn.LayerNorm(1e-5)
  chex.assert_trees_all_equal(*(n.init(keys[0], x) for n in (ours, linens)))
  got, want = (
    jax.value_and_grad(loss, (1, 2))(n, params, x) for n in (ours, linens)
  )
  chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


def test_half_precision_is_normalised_in_float32():
  x = jax.random.normal(jax.random.key(0), (2, 4), jnp.bfloat16)
  y, _ = LayerNorm().init_with_output(jax.random.key(0), x)
  assert y.dtype == jnp.float32
  g = jax.grad(
    lambda x: LayerNorm().init_with_output(jax.random.key(0), x)[0].sum()
  )(x)
  assert g.dtype == x.dtype
