import chex
import jax.numpy as jnp
import pytest

from jaxformers import models
from jaxformers.training import state
from tests import optimizers


@pytest.mark.slow
def test_create_is_a_function_of_the_seed():
  model = models.build(
    "transject", vocab_size=9, max_len=9, num_classes=2, d_model=8, num_layers=1
  )
  tx, _ = optimizers.build(
    {"name": "adam"}, {"name": "constant", "learning_rate": 1e-3}, 10
  )
  first, again, other = (state.create(model, tx, seed) for seed in (0, 0, 1))
  chex.assert_trees_all_equal(first, again)
  skew = other.params["encoder"]["layer_0"]["mixer"]["u_skew"]
  assert not jnp.array_equal(
    skew, first.params["encoder"]["layer_0"]["mixer"]["u_skew"]
  )
  assert first.step == 0
  assert first.step.dtype == jnp.int32
  # Losses sown while initialising are no parameters.
  assert set(first.params) == {"encoder", "head"}
