"""What a model is applied to."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformers import models
from jaxformers.models.variables import make_variables
from tests import initial

IDS = jax.random.randint(jax.random.key(0), (2, 6), 1, 30)


@pytest.mark.parametrize("name", ["transformer", "random_transject"])
def test_outputs_are_those_of_the_parameters_alone(name):
  model = models.build(
    name, vocab_size=30, max_len=6, num_classes=2, d_model=8, num_layers=2
  )
  params = initial.params(model, IDS)
  variables = make_variables(model, params)
  assert variables["params"] is params
  chex.assert_trees_all_close(
    model.apply(variables, IDS, train=False),
    model.apply({"params": params}, IDS, train=False),
    atol=1e-5,
  )
  assert jnp.isfinite(model.apply(variables, IDS, train=False)).all()
