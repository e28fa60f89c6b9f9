"""Classifiers: what the config says of pool and head."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from tests import initial

SIZES = dict(vocab_size=20, max_len=8, num_classes=3, d_model=8, num_layers=1)


@pytest.mark.parametrize("name", ["s5", "transformer"])
def test_holes_change_no_causal_classifier(name):
  """Neither its positions nor its step sizes."""
  model = models.build(name, **SIZES, causal=True, positions="sinusoid")
  holes = jnp.array([[0, 3, 0, 5, 7, 2]])
  params = initial.params(model, holes)
  sizes = jnp.array([[1, 2, 1, 3, 0.5, 1.5]])

  def run(ids, sizes):
    more = {"step_sizes": sizes} if name == "s5" else {}
    return model.apply({"params": params}, ids, train=False, **more)

  want = run(holes[holes > 0][None], sizes[holes > 0][None])
  np.testing.assert_allclose(run(holes, sizes), want, rtol=1e-4, atol=1e-5)


def test_classifier_has_the_head_of_its_config():
  model = models.build(
    "transformer", **SIZES, head_dim=6, head_layers=2, pool="max"
  )
  head = models.shapes(model)["head"]
  assert head["hidden"]["kernel"].shape == (8, 6)
  assert head["hidden_1"]["kernel"].shape == (6, 3)
  assert head["logits"]["kernel"].shape == (3, 3)


@pytest.mark.parametrize("padded_len", [0, 16])
@pytest.mark.slow
def test_padded_mean_divides_by_padded_len(padded_len):
  """A head without hidden layers is linear in what the pool gives."""
  model = models.build(
    "transformer", **SIZES, pool="padded_mean", padded_len=padded_len
  )
  ids = jnp.ones((1, 4), jnp.int32)
  params = initial.params(model, ids)
  mean = models.build("transformer", **SIZES)
  share = 4 / (padded_len or 8)
  padded = model.apply({"params": params}, ids, train=False)
  whole = mean.apply({"params": params}, ids, train=False)
  assert jnp.allclose(padded, share * whole, atol=1e-6)
