"""Models of sentences: pairs apart, and a layer in training alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from tests import initial

pytestmark = pytest.mark.slow

SIZES = dict(
  vocab_size=20,
  max_len=9,
  num_classes=0,
  num_inputs=2,
  d_model=8,
  num_layers=1,
  objective="sentences",
)
IDS = jnp.array([[[2, 5, 3, 0], [2, 6, 7, 3]], [[2, 8, 9, 3], [2, 5, 3, 0]]])


def test_sentence_vector_does_not_depend_on_its_pair():
  model = models.build("transformer", pool="first", **SIZES)
  params = initial.params(model, IDS)
  vectors = model.apply({"params": params}, IDS, train=False)
  assert vectors.shape == (2, 2, 8)
  np.testing.assert_allclose(vectors[0, 0], vectors[1, 1], atol=1e-6)
  swapped = model.apply({"params": params}, IDS[:, ::-1], train=False)
  np.testing.assert_allclose(swapped[:, ::-1], vectors, atol=1e-6)


def test_sentence_model_uses_its_layer_in_training_only():
  model = models.build(
    "transformer", head_dim=5, head_activation="tanh", **SIZES
  )
  params = initial.params(model, IDS)
  assert params["decoder"]["kernel"].shape == (8, 5)
  pooled = model.apply({"params": params}, IDS, train=False)
  assert pooled.shape == (2, 2, 8)
  trained = model.apply({"params": params}, IDS, train=True)
  layer = params["decoder"]
  want = np.tanh(pooled @ layer["kernel"] + layer["bias"])
  np.testing.assert_allclose(trained, want, atol=1e-5)


def test_sentence_dropout_differs_within_a_pair():
  model = models.build("transformer", dropout_rate=0.5, **SIZES)
  params = initial.params(model, IDS)
  same = jnp.stack([IDS[:, 0], IDS[:, 0]], 1)
  key = {"dropout": jax.random.key(0)}
  vectors = model.apply({"params": params}, same, train=True, rngs=key)
  assert (jnp.abs(vectors[:, 0] - vectors[:, 1]).max(-1) > 1e-3).all()


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("transformer", {"interaction": "nli"}, "interaction='nli'.*cosine"),
    ("transformer", {"pool_norm": "layer"}, "pool_norm='layer'"),
    ("rglru", {"pool": "cls"}, """pool="cls".*'rglru'"""),
  ],
)
def test_sentence_model_refuses_wrong_options(name, options, message):
  with pytest.raises(ValueError, match=message):
    models.build(name, **SIZES | options)
