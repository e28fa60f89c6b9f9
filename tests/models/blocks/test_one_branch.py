"""The block of state-space models, by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.models.norm import LayerNorm
from tests import draws, initial

X = draws.normal(0, (2, 5, 8))
KW = {"mask": jnp.ones((2, 5), bool), "carry": None}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.slow
def test_one_branch_block_adds_the_mixer_to_its_input(norm_first):
  block = BLOCKS["one_branch"](
    MIXERS["lru"], num_layers=1, norm_first=norm_first
  )
  params = initial.params(block, X, seed=1, **KW)
  assert set(params) == {"mixer", "norm"}
  y, _ = block.apply({"params": params}, X, train=False, **KW)

  def norm(x):
    return LayerNorm().apply({"params": params["norm"]}, x)

  mixed, _ = MIXERS["lru"]().apply(
    {"params": params["mixer"]}, norm(X) if norm_first else X, train=False, **KW
  )
  want = X + mixed if norm_first else norm(X + mixed)
  chex.assert_trees_all_close(y, want, atol=1e-6)


@pytest.mark.slow
def test_one_branch_dropout_drops_whole_channels():
  block = BLOCKS["one_branch"](MIXERS["lru"], num_layers=1, dropout_rate=0.5)
  params = initial.params(block, X, seed=1, **KW)
  y, _ = block.apply(
    {"params": params}, X, train=True, rngs={"dropout": jax.random.key(2)}, **KW
  )
  is_dropped = np.asarray(y == X)
  assert (is_dropped == is_dropped[:, :1]).all()
  assert 0.2 < is_dropped.mean() < 0.8
