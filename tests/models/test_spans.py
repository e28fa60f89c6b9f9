"""Models of answers: padding, the second part, and weights of BERT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models.embedding import second_part
from tests import initial

pytestmark = pytest.mark.slow

SIZES = dict(
  vocab_size=20, max_len=9, num_classes=0, d_model=8, num_layers=1, separator=3
)


@pytest.fixture(scope="module", params=["transformer", "transject", "s5"])
def built(request):
  model = models.build(request.param, objective="spans", **SIZES)
  ids = jnp.array([[2, 5, 3, 7, 8, 3, 0], [2, 5, 6, 3, 9, 9, 3]])
  return model, initial.params(model, ids), ids


@pytest.mark.slow
def test_span_logits_of_padding_are_lowest(built):
  model, params, ids = built
  apply = jax.jit(lambda ids: model.apply({"params": params}, ids, train=False))
  logits = apply(ids)
  assert logits.shape == (2, 7, 2)
  assert (logits[0, -1] == jnp.finfo(jnp.float32).min).all()
  padded = apply(jnp.pad(ids, ((0, 0), (0, 2))))[:, :7]
  real = np.asarray(ids)[..., None] > 0
  np.testing.assert_allclose(
    np.where(real, padded, 0), np.where(real, logits, 0), atol=1e-5
  )


def test_span_model_adds_a_segment_vector_to_the_second_part(built):
  model, params, ids = built
  segments = second_part(ids, 3)
  np.testing.assert_array_equal(
    segments, [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]]
  )
  table = params["encoder"]["embedding"]["segments"]
  assert table.shape[0] == 2
  assert not table.any()  # So that weights of one part stay what they are.
  embedding = params["encoder"]["embedding"]
  shift = jnp.arange(table.shape[1], dtype=jnp.float32)
  changed = embedding | {"segments": table.at[1].set(shift)}
  other = params | {"encoder": params["encoder"] | {"embedding": changed}}
  apply = jax.jit(lambda p: model.apply({"params": p}, ids, train=False))
  assert jnp.abs(apply(params) - apply(other))[1].max() > 1e-3


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"vocab_size": 0, "separator": 0}, "'spans'.*texts"),
    ({"separator": 20}, "separator=20.*20"),
    ({"head_dim": 4}, "head_dim=4"),
    ({"head": {"tied": True}}, "head.*'tied'"),
  ],
)
def test_span_model_refuses_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    models.build("transformer", objective="spans", **SIZES | options)
