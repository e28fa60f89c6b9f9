"""Segmenter: a class for every pixel."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models.segmenter import MaskTransformer, unit
from tests import draws, initial

pytestmark = pytest.mark.slow

IMAGES = draws.normal(0, (2, 12, 8, 3))


def build(name="neutreno", **options):
  sizes = {"d_model": 8, "num_layers": 2, "patch_size": 4, "pool": "cls"}
  return models.build(
    name,
    vocab_size=0,
    max_len=0,
    num_classes=5,
    objective="segmentation",
    image=(12, 8, 3),
    positions="learned",
    **(sizes | options),
  )


def init(model):
  return initial.params(model, IMAGES, seed=1)


def logits_of(model, params, images=IMAGES):
  apply = jax.jit(functools.partial(model.apply, train=False))
  return apply({"params": params}, images)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "pool"),
  [
    ("neutreno", "cls"),
    pytest.param("transformer", "mean", marks=pytest.mark.long),
    ("transject", "mean"),
  ],
)
def test_segmenter_scores_every_pixel(name, pool, strict):
  model = build(name, pool=pool)
  params = init(model)
  logits = logits_of(model, params)
  assert logits.shape == (2, 12, 8, 5)
  assert logits.dtype == jnp.float32
  one = logits_of(model, params, IMAGES[1:])
  # 3.5e-5 on a processor where products of other batches are summed otherwise.
  chex.assert_trees_all_close(one[0], logits[1], atol=1e-4)


@pytest.mark.long
def test_segmenter_scores_are_interpolated_normalised_cosines():
  model = build(head={"num_layers": 1, "dropout_rate": 0.0})
  params = init(model)
  logits, state = model.apply(
    {"params": params},
    IMAGES,
    train=False,
    capture_intermediates=lambda module, _: isinstance(module, MaskTransformer),
  )
  scores = state["intermediates"]["decoder"]["__call__"][0]
  assert scores.shape == (2, 6, 5)
  np.testing.assert_allclose(scores.mean(-1), 0, atol=1e-5)
  # Between the middles of two patches it goes in a straight line.
  own = scores.reshape(2, 3, 2, 5)
  want = own[:, 0] * 5 / 8 + own[:, 1] * 3 / 8
  np.testing.assert_allclose(logits[:, 3, 0], want[:, 0], atol=1e-5)
  np.testing.assert_allclose(logits[:, 0, 0], own[:, 0, 0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_segmenter_decoder_fidelity_uses_its_own_first_values():
  plain, faithful = (
    build("transformer", head={"num_layers": n}) for n in (1, 2)
  )
  term = {"fidelity": 5.0}
  for layers, same in ((1, True), (2, False)):
    model = build("transformer", num_layers=1, head={"num_layers": layers})
    held = build(
      "transformer", num_layers=1, head={"num_layers": layers}, mixer=term
    )
    params = init(model)
    got, want = (logits_of(one, params) for one in (held, model))
    # One layer in the encoder and one in the decoder: two first layers.
    assert bool(jnp.allclose(got, want, atol=1e-6)) == same
  assert models.size(faithful) > models.size(plain)


@pytest.mark.slow
@pytest.mark.long
def test_segmenter_decoder_dropout_acts_in_training_only():
  """In training; by default it drops what the encoder's mixer does."""
  variables = {"params": init(build("transformer"))}

  def train(key, **options):
    head = {"dropout_rate": 0.0} | options.pop("head", {})
    model = build("transformer", head=head, **options)
    apply = functools.partial(model.apply, train=True, mutable="intermediates")
    rngs = {"dropout": jax.random.key(key)}
    logits, state = jax.jit(apply)(variables, IMAGES, rngs=rngs)
    return logits, state["intermediates"]["encoder"]["hidden"]

  dropped = {"head": {"mixer_defaults": {"dropout_rate": 0.5}}}
  plain, encoded = train(0)
  for key in (0, 1):
    logits, hidden = train(key, **dropped)
    chex.assert_trees_all_close(hidden, encoded, atol=1e-6)
    assert jnp.abs(logits - plain).max() > 1e-3
  assert jnp.abs(train(0, **dropped)[0] - logits).max() > 1e-3
  # Without them the decoder's rate is that of the encoder.
  rate = {"dropout_rate": 0.5}
  both, hidden = train(0, mixer_defaults=rate)
  assert jnp.abs(hidden[-1] - encoded[-1]).max() > 1e-3
  none = {"mixer_defaults": {"dropout_rate": 0.0}}
  encoder_alone, _ = train(0, mixer_defaults=rate, head=none)
  assert jnp.abs(encoder_alone - both).max() > 1e-3


@pytest.mark.slow
def test_segmenter_classes_attend_to_each_other():
  model = build("transformer", head={"num_layers": 2, "dropout_rate": 0.0})
  params = init(model)
  own = params["decoder"]["classes"]
  for c in (0, 4):
    params["decoder"]["classes"] = own.at[c].add(jnp.arange(8.0))
    moved = logits_of(model, params)
    params["decoder"]["classes"] = own
    plain = logits_of(model, params)
    assert (jnp.abs(moved - plain).max((1, 2)) > 1e-4).all()


def test_unit_of_a_zero_vector_has_a_finite_gradient():
  grad = jax.grad(lambda x: unit(x).sum())(jnp.zeros((2, 3)))
  assert jnp.isfinite(grad).all()
  np.testing.assert_allclose(jnp.linalg.norm(unit(IMAGES), axis=-1), 1, 1e-6)


def test_segmenter_refuses_wrong_options():
  with pytest.raises(ValueError, match=r"patch_size=5.*12 x 8"):
    build(patch_size=5)
  with pytest.raises(ValueError, match="[Ss]egmentation.*images.*sequences"):
    models.build(
      "transformer",
      vocab_size=9,
      max_len=9,
      num_classes=5,
      d_model=8,
      num_layers=1,
      objective="segmentation",
    )
  with pytest.raises(ValueError, match=r"'depth'.*num_layers"):
    build(head={"depth": 2})
  with pytest.raises(ValueError, match="dropout_rate=1.0"):
    build(head={"mixer_defaults": {"dropout_rate": 1.0}})
  with pytest.raises(ValueError, match="pool='padded_mean'"):
    build(pool="padded_mean")
  with pytest.raises(ValueError, match=r"cutoffs=\(3,\)"):
    models.shapes(build(embedding={"cutoffs": (3,)}))
  with pytest.raises(ValueError, match="head.num_layers=0"):
    build(head={"num_layers": 0})
