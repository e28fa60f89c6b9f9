"""Injectivity and Lipschitz bounds of every invertible block, with chex.

The layers run with jit, without it and under pmap; hypothesis draws sequences.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformers import models
from jaxformers.analysis.certificates import lipschitz
from jaxformers.models.blocks import invertible
from jaxformers.models.variables import make_variables, of_stack
from tests import initial
from tests.assertions import assert_between

WIDTH, LENGTH, NUM_LAYERS = 8, 6, 2
IDS = jnp.array([[3, 1, 4, 1, 5, 2], [2, 6, 5, 0, 0, 0]])
MASK = np.array([[True] * 6, [True, True, False, True, True, False]])
COUPLED = {"coupled": True, "block": {"norm_type": "none"}}
# Every block with a certificate, and whether it holds for whole sequences.
BLOCKS = [
  ("isometric", "isometric", {}, "sequences"),
  (
    "feed_forward",
    "isometric",
    {"block": {"form": "feed_forward"}},
    "sequences",
  ),
  ("allpass", "allpass", {}, "sequences"),
  ("certified_s4d", "certified_s4d", {}, "sequences"),
  ("coupled", "allpass", COUPLED, "sequences"),
  (
    "certified",
    "random_transject",
    {"mixer": {"gating": "certified"}},
    "sequences",
  ),
  ("paper", "random_transject", {"mixer": {"gating": "paper"}}, "tokens"),
]


@functools.cache
def make(label):
  """Returns layers, their weights and shared values, and a certificate."""
  _, name, options, _ = next(block for block in BLOCKS if block[0] == label)
  model = models.build(
    name,
    vocab_size=20,
    max_len=LENGTH,
    num_classes=3,
    d_model=WIDTH,
    num_layers=NUM_LAYERS,
    **options,
  )
  params = initial.params(model, IDS)
  for i in range(NUM_LAYERS):
    layer = params["encoder"][f"layer_{i}"]
    for part in (layer, layer.get("residual", {})):
      if "alpha" in part:
        part["alpha"] = jnp.float32(0.8)
  variables = jax.jit(functools.partial(make_variables, model))(params)
  variables = of_stack(variables, "encoder")
  layers = invertible.require_layers(model.stacks()["encoder"])
  x = np.zeros((2, LENGTH, WIDTH), np.float32)
  shared = jax.jit(lambda v: layers.shared(v, x, MASK).value)(variables)
  rows = lipschitz.guaranteed(model, params, shared, [1.0] * NUM_LAYERS)
  return layers, layers.weights(variables), shared, rows


def norm(x, axes):
  return np.sqrt(np.square(np.asarray(x, np.float64)).sum(axes))


class PropertiesTest(chex.TestCase):
  """Certificates of two sequences, and of two tokens of a sequence."""

  @chex.variants(with_jit=True)
  @parameterized.parameters(*[(label, kind) for label, *_, kind in BLOCKS])
  def test_block_distances_stay_within_the_certificate(self, label, kind):
    self.check_distances(label, kind)

  @chex.variants(with_pmap=True)
  @parameterized.parameters(("certified", "sequences"), ("paper", "tokens"))
  @pytest.mark.slow
  def test_block_distances_under_pmap_stay_within_the_certificate(
    self, label, kind
  ):
    """Under pmap a block computes what it does under jit: two blocks."""
    self.check_distances(label, kind)

  @chex.variants(without_jit=True)
  @parameterized.parameters(("isometric", "sequences"), ("paper", "tokens"))
  @pytest.mark.slow
  def test_block_distances_without_jit_stay_within_the_certificate(
    self, label, kind
  ):
    """Programs of single operations take long to compile: two blocks."""
    self.check_distances(label, kind)

  def check_distances(self, label, kind):
    layers, weights, shared, rows = make(label)
    low, high = lipschitz.product([row[kind] for row in rows])

    def forward(weights, x, shared):
      sides = []
      for layer in weights:
        x, side = layers.forward(layer, x, shared, MASK)
        sides.append(side)
      return x, sides

    @jax.jit
    def undo(weights, y, shared, sides):
      for layer, side in zip(weights[::-1], sides[::-1], strict=True):
        y = invertible.inverse(layers, layer, y, shared, MASK, side)
      return y

    forward = self.variant(forward)

    @settings(max_examples=4)
    @given(seed=st.integers(0, 2**31), exponent=st.floats(-2, 2))
    def check(seed, exponent):
      rng = np.random.default_rng(seed)
      x, step = rng.normal(size=(2, 2, LENGTH, WIDTH)).astype(np.float32)
      other = x + np.float32(10**exponent) * step
      x, other = (np.where(MASK[..., None], z, 0) for z in (x, other))
      (y, sides), (z, _) = (forward(weights, a, shared) for a in (x, other))
      chex.assert_tree_all_finite((y, z))
      y, z = (np.where(MASK[..., None], np.asarray(a), 0) for a in (y, z))
      # Rounding counts in differences of near sequences.
      rounding = 1e-5 * norm(x, None)
      if kind == "sequences":
        before, after = norm(x - other, (1, 2)), norm(y - z, (1, 2))
        assert_between(
          after, low * before, high * before, rtol=1e-5, atol=rounding
        )
      # Two tokens of one sequence.
      tokens = [(0, 1), (1, 4), (3, 4)]
      for i, j in tokens if "tokens" in rows[0] else ():
        low_t, high_t = lipschitz.product([row["tokens"] for row in rows])
        before, after = norm(x[:, i] - x[:, j], 1), norm(y[:, i] - y[:, j], 1)
        assert_between(
          after, low_t * before, high_t * before, rtol=1e-5, atol=rounding
        )
      # Injective: the layers are undone from their output.
      back = undo(weights, y, shared, sides)
      back = np.where(MASK[..., None], back, 0)
      chex.assert_trees_all_close(back, x, rtol=0, atol=2e-5 * np.abs(x).max())

    assert 0 < low < high
    check()
