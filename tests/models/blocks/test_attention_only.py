"""The block of attention alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from tests import draws, initial


@pytest.mark.parametrize("residual", [False, True])
def test_attention_only_block_adds_the_mixer_to_its_input(residual):
  x = draws.normal(0, (2, 6, 8))
  kw = {"mask": jnp.ones((2, 6), bool), "carry": None, "train": False}
  block = BLOCKS["attention_only"](
    MIXERS["linearized"], num_layers=1, residual=residual
  )
  params = initial.params(block, x, seed=1, **kw)
  mixed, _ = MIXERS["linearized"]().apply({"params": params["mixer"]}, x, **kw)
  y, _ = block.apply({"params": params}, x, **kw)
  np.testing.assert_allclose(y, mixed + residual * x, atol=1e-6)
