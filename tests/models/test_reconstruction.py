"""Models of their own inputs: what they see, and what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models import MODELS, ModelConfig
from tests import initial
from tests.marks import long_except, slow_except

pytestmark = pytest.mark.slow

IDS = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8], [3, 2, 1, 4, 5, 0, 0, 0]])
TARGETS = jnp.where(IDS > 0, 9 - IDS, 0)
VALUES = jnp.linspace(-2, 2, 16).reshape(2, 8)


# Where the defaults are beyond eight tokens.
SMALL = {
  "linformer": {"rank": 4},
  "nystromformer": {"num_landmarks": 4},
  "skyformer": {"num_landmarks": 4},
}


def build(objective, name="transformer", **options):
  real = objective.endswith("values")
  sizes = {"vocab_size": 0 if real else 10, "num_classes": 0 if real else 9}
  sizes |= {"max_len": 8, "d_model": 8, "num_layers": 2}
  return models.build(name, objective=objective, **(sizes | options))


def names(objective):
  """Models that have an objective at the sizes of `build`."""
  causal = objective.startswith("next")
  found = []
  for name in MODELS:
    options = {"num_classes": 9, "vocab_size": 10, "max_len": 8}
    options |= {"d_model": 8, "num_layers": 1, "name": name}
    config = ModelConfig(**options)
    if causal:
      if has_causal_form(options):
        found.append(name)
    elif not config.is_causal:
      found.append(name)
  return found


@pytest.mark.parametrize("name", long_except("transformer", names("masked")))
@pytest.mark.slow
def test_masked_model_of_every_bidirectional_mixer_has_log_probabilities(name):
  model = build("masked_tokens", name, mixer=SMALL.get(name, {}))
  params = initial.params(model, IDS)
  log_p = model.apply({"params": params}, IDS, train=False)
  assert log_p.shape == (2, 8, 9)
  np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1, rtol=1e-5)
  of_targets = model.apply({"params": params}, IDS, TARGETS, train=False)
  want = jnp.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0]
  np.testing.assert_array_equal(of_targets, want)


def has_causal_form(options):
  try:
    ModelConfig(**options, objective="next_tokens")
  except ValueError:
    return False
  return True


@pytest.mark.parametrize(
  "name", slow_except(("rglru",), names("next"), ("transformer", "rglru"))
)
@pytest.mark.parametrize("kind", ["tokens", "values"])
def test_next_model_does_not_see_its_target(name, kind):
  model = build(f"next_{kind}", name)
  x = IDS if kind == "tokens" else VALUES
  params = initial.params(model, x)
  apply = jax.jit(lambda x: model.apply({"params": params}, x, train=False))
  other = x.at[:, 4].set(x[:, 5])
  before, after = np.asarray(apply(x)), np.asarray(apply(other))
  np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-6)
  assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-6


@pytest.mark.slow
def test_masked_model_marks_masked_numbers():
  model = build("masked_values")
  masked = VALUES.at[0, 3].set(jnp.nan)
  params = initial.params(model, VALUES)
  kernel = params["encoder"]["embedding"]["values"]["kernel"]
  assert kernel.shape == (2, 8)
  apply = jax.jit(lambda x: model.apply({"params": params}, x, train=False))
  got = apply(masked)
  assert got.shape == (2, 8)
  assert np.isfinite(got).all()
  # Neither zero, nor what was there.
  for value in (0.0, VALUES[0, 3]):
    assert np.abs(got - apply(VALUES.at[0, 3].set(value)))[0].max() > 1e-6
  np.testing.assert_array_equal(got[1], apply(VALUES)[1])

  # The gradient is finite, too.
  def loss(params):
    return model.apply({"params": params}, masked, train=False).sum()

  for leaf in jax.tree.leaves(jax.grad(loss)(params)):
    assert np.isfinite(leaf).all()


def test_next_model_of_pixel_classes_reads_numbers():
  model = build("masked_tokens", vocab_size=0, num_classes=256)
  masked = VALUES.at[0, 3].set(jnp.nan)
  params = initial.params(model, VALUES)
  log_p = model.apply({"params": params}, masked, train=False)
  assert log_p.shape == (2, 8, 256)
  assert np.isfinite(log_p).all()


def test_reconstruction_model_gives_the_class_token_no_target():
  model = build("masked_tokens", pool="cls")
  params = initial.params(model, IDS)
  assert model.apply({"params": params}, IDS, train=False).shape == (2, 8, 9)


@pytest.mark.parametrize(
  ("objective", "options", "message"),
  [
    ("masked_tokens", {"name": "mamba"}, "'mamba'.*causal=False"),
    ("masked_tokens", {"mixer": {"causal": True}}, "objective=causal"),
    ("next_tokens", {"name": "linformer"}, "'linformer'.*performer"),
    ("next_tokens", {"mixer": {"causal": False}}, "mixer.causal=False"),
    ("next_tokens", {"pool": "cls"}, "pool='cls'"),
    ("masked_tokens", {"head_dim": 4}, "head_dim=4"),
    ("masked_tokens", {"num_classes": 0}, "num_classes=0.*'masked_tokens'"),
    ("masked_tokens", {"head": {"tied": True}}, "head.*'tied'"),
    (
      "masked_values",
      {"image": (8, 8, 3), "patch_size": 4},
      "'masked_values'.*images",
    ),
  ],
)
def test_reconstruction_objectives_refuse_wrong_options(
  objective, options, message
):
  with pytest.raises(ValueError, match=message):
    build(objective, **options)
