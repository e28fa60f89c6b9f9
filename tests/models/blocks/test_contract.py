"""What must hold for every registered block."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from tests import draws, initial
from tests.marks import slow_except

MIXER_OF = {
  "attention_only": "linearized",
  "contractive": "allpass",
  "coupled": "softmax",
  "gated": "mega",
  "one_branch": "lru",
  "pre_norm": "softmax",
  "rezero": "softmax",
  "injective": "transject",
}


@pytest.mark.parametrize(
  "name",
  slow_except(
    ("pre_norm",), sorted(BLOCKS), ("gated", "pre_norm", "isometric")
  ),
)
def test_block_keeps_shape_and_type_and_reads_no_padding(name, strict):
  options = {"max_len": 6} if name == "gated" else {}
  mixers = []
  if name != "isometric":  # It has no mixer.
    mixers = [functools.partial(MIXERS[MIXER_OF[name]], **options)]
  block = BLOCKS[name](*mixers, num_layers=2)
  x = draws.normal(0, (2, 6, 8))
  mask = jnp.arange(6)[None] < jnp.array([[6], [4]])
  kw = {"mask": mask, "carry": None, "train": False}
  params = initial.params(block, x, seed=1, **kw)
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)
  apply = jax.jit(lambda x: block.apply({"params": params}, x, **kw)[0])
  y, z = (apply(jnp.where(mask[..., None], x, pad)) for pad in (0.0, 50.0))
  chex.assert_equal_shape([x, y])
  chex.assert_trees_all_close(y[1, :4], z[1, :4], atol=1e-5)
