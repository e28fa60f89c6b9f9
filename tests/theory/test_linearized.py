"""The linearised network: literal, compact, and as a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.theory import bounds
from jaxformers.theory import linearized as lin
from jaxformers.theory.rank import Weights
from tests import initial


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def draw(depth, heads, d, seed=0):
  rng = np.random.default_rng(seed)
  shape = (2, depth, heads, d, d)
  return Weights(*jnp.asarray(0.3 * rng.normal(size=shape)))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
  ("depth", "heads", "d"), [(1, 1, 3), (2, 2, 4), (3, 1, 2)]
)
def test_compact_equals_literal(depth, heads, d, residual):
  maps = draw(depth, heads, d)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(5, d)))
  want = lin.literal(x, maps, residual)
  got = lin.compact(x, maps, residual)
  np.testing.assert_allclose(
    got, want, rtol=0, atol=1e-12 * jnp.abs(want).max()
  )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_compact_is_homogeneous_of_degree_3_to_the_depth(depth):
  maps = draw(depth, 1, 3)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))
  want = 1.3 ** (2 * bounds.degree(depth) + 1) * lin.compact(x, maps)
  np.testing.assert_allclose(lin.compact(1.3 * x, maps), want, rtol=1e-11)


def network(num_layers, residual, **options):
  """Layers of the registered mixer: x [n, d], their params, their function."""
  mixer = functools.partial(
    MIXERS["linearized"], num_heads=2, dtype=jnp.float64, scale=0.5, **options
  )
  block = BLOCKS["attention_only"](mixer, num_layers, residual=residual)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(5, 4)))
  kw = {"mask": jnp.ones((1, 5), bool), "carry": None, "train": False}
  layer = initial.params(block, x[None], **kw)
  params = {
    f"layer_{k}": jax.tree.map(
      lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), layer
    )
    for k in range(num_layers)
  }
  y = x[None]
  for k in range(num_layers):
    y, _ = block.apply({"params": params[f"layer_{k}"]}, y, **kw)
  return x, lin.maps(params, 0.5), y[0]


@pytest.mark.parametrize("residual", [False, True])
def test_linearized_model_is_the_compact_form(residual):
  x, maps, y = network(3, residual)
  want = lin.compact(x, maps, residual)
  np.testing.assert_allclose(y, want, atol=1e-12 * jnp.abs(want).max())


def test_causal_linearized_model_has_the_same_last_token():
  x, maps, y = network(1, True, causal=True)
  want = lin.compact(x, maps, True)
  np.testing.assert_allclose(y[-1], want[-1], atol=1e-12 * jnp.abs(want).max())


def test_linearized_model_has_four_maps_a_layer():
  with jax.enable_x64(False):
    model = models.build(
      "linearized",
      vocab_size=10,
      max_len=6,
      num_classes=2,
      d_model=4,
      num_layers=3,
    )
    layers = models.shapes(model)["encoder"]
    assert "norm" not in layers
    assert {*layers["layer_0"]["mixer"]} == {"query", "key", "value", "out"}
    assert sum(leaf.size for leaf in jax.tree.leaves(layers["layer_1"])) == 64
