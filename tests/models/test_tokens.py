"""Models with a class for every token: what they see, and their state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import MODELS, ModelConfig
from tests import initial
from tests.marks import slow_except

IDS = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8], [3, 2, 1, 4, 5, 0, 0, 0]])
SIZES = {
  "vocab_size": 10,
  "max_len": 8,
  "num_classes": 3,
  "d_model": 8,
  "num_layers": 1,
  "objective": "token_classification",
}


def causal_models():
  found = []
  for name in MODELS:
    try:
      ModelConfig(name=name, causal=True, **SIZES)
    except UserError:
      continue
    found.append(name)
  return found


@pytest.mark.parametrize(
  "name",
  slow_except(
    ("s5", "transformer"),
    causal_models(),
    ("allpass", "deltaproduct", "linear_transformer", "mega"),
  ),
)
def test_a_causal_token_classifier_does_not_see_later_tokens(name):
  model = models.build(name, causal=True, **SIZES)
  params = initial.params(model, IDS)
  apply = jax.jit(lambda x: model.apply({"params": params}, x, train=False))
  logits = apply(IDS)
  assert logits.shape == (2, 8, 3)
  assert logits.dtype == jnp.float32
  changed = apply(IDS.at[:, 4:].set(9))
  np.testing.assert_allclose(changed[:, :4], logits[:, :4], atol=1e-5)
  assert jnp.abs(changed[0, 4:] - logits[0, 4:]).max() > 1e-4


def test_a_token_classifier_sees_both_sides_by_default():
  model = models.build("transformer", **SIZES)
  params = initial.params(model, IDS)
  logits, changed = (
    model.apply({"params": params}, x, train=False)
    for x in (IDS, IDS.at[:, 4:].set(9))
  )
  assert jnp.abs(changed[0, :4] - logits[0, :4]).max() > 1e-4


def test_a_token_classifier_is_refused_what_it_may_not_see():
  with pytest.raises(UserError, match="later tokens"):
    models.build("transformer", causal=True, mixer={"causal": False}, **SIZES)
  with pytest.raises(UserError, match="no causal form"):
    models.build("linformer", causal=True, **SIZES)
  with pytest.raises(UserError, match="sequences, but this task has images"):
    models.build("transformer", **SIZES | {"image": (8, 8, 3)}, patch_size=4)


def test_state_bytes_of_attention_grow_with_the_length():
  """Softmax keeps d keys and values a token; S5 keeps complex states."""
  sizes = SIZES | {"positions": "none", "max_len": 32}
  attention, recurrence = (
    models.build(name, causal=True, **sizes) for name in ("transformer", "s5")
  )
  for n in (8, 32):
    assert models.state_bytes(attention, n) == 4 * 2 * 8 * n
  assert models.state_bytes(recurrence, 8) == models.state_bytes(recurrence, 32)


@pytest.mark.parametrize(
  ("name", "options"),
  [("mamba", {"step_min": 1.0, "step_max": 2.0}), ("rglru", {})],
)
def test_signed_factors_alternate_the_sign_of_the_state(name, options):
  """A factor of -1 is reached, and factors stay within [-1, 1]."""
  from jaxformers.models.mixers.recurrence import decay

  log_a = jnp.array([-30.0, -1.0, 0.0])
  np.testing.assert_allclose(
    decay(log_a, signed=True), [-1, 2 / np.e - 1, 1], rtol=1e-6
  )
  plain, signed = (
    models.build(name, causal=True, mixer={"signed": value, **options}, **SIZES)
    for value in (False, True)
  )
  params = initial.params(plain, IDS)
  outputs = [
    model.apply({"params": params}, IDS, train=False)
    for model in (plain, signed)
  ]
  assert jnp.abs(outputs[0] - outputs[1]).max() > 1e-5
