"""Decoder-only language models."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from tests import draws, initial

IDS = draws.integers(0, (2, 9), 1, 30)
CAUSAL = ["transformer", "neutreno", "performer", "transformer_rezero"]


def build(name="neutreno", **options):
  sizes = {"d_model": 8, "num_layers": 3, "vocab_size": 30, "max_len": 9}
  return models.build(
    name, num_classes=0, objective="language_model", **(sizes | options)
  )


def parameters(model):
  params = initial.params(model, IDS, seed=1)
  return jax.tree.map(
    lambda leaf: leaf + 0.1 * draws.normal(2, leaf.shape),
    params,
  )


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.slow
def test_language_model_does_not_see_later_tokens(name):
  model = build(name)
  params = parameters(model)
  run = jax.jit(functools.partial(model.apply, train=False))
  log_p = run({"params": params}, IDS)
  assert log_p.shape == (2, 9, 30)
  other = run({"params": params}, IDS.at[:, 5:].set(7))
  chex.assert_trees_all_close(log_p[:, :5], other[:, :5], atol=1e-5)
  assert jnp.abs(log_p[:, 5:] - other[:, 5:])[..., 1:].max() > 1e-3
  np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"head": {"tied": False}},
    pytest.param({"embedding": {"cutoffs": (6, 15)}}, marks=pytest.mark.long),
    {"embedding": {"cutoffs": (6, 15), "div_value": 2}},
    pytest.param(
      {"embedding": {"cutoffs": (6,), "div_value": 2}, "head": {"tied": False}},
      marks=pytest.mark.long,
    ),
  ],
  ids=["plain", "untied", "adaptive", "narrower", "untied adaptive"],
)
@pytest.mark.slow
def test_language_model_targets_have_the_probabilities_of_all_words(options):
  model = build(**options)
  params = parameters(model)
  chex.assert_trees_all_equal_shapes(params, models.shapes(model))
  targets = jnp.roll(IDS, -1, 1)
  weights = jnp.ones(IDS.shape).at[:, -1].set(0)
  run = jax.jit(functools.partial(model.apply, train=False))
  got = run({"params": params}, IDS, targets, weights)
  log_p = run({"params": params}, IDS)
  want = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(got[:, :-1], want[:, :-1], atol=1e-5)
  assert (got[:, -1] == 0).all()


@pytest.mark.slow
def test_language_model_head_dropout_acts_in_training_only():
  plain, dropping = build(), build(head={"dropout_rate": 0.5})
  params = parameters(plain)
  chex.assert_trees_all_equal_shapes(params, models.shapes(dropping))

  def run(model, key, *, train):
    return jax.jit(functools.partial(model.apply, train=train))(
      {"params": params}, IDS, rngs={"dropout": jax.random.key(key)}
    )

  want = run(plain, 0, train=True)
  chex.assert_trees_all_equal(run(dropping, 0, train=False), want)
  first, second = (run(dropping, key, train=True) for key in (0, 1))
  # Every token loses something, and not the same with another key.
  assert (jnp.abs(first - want)[..., 1:].max(-1) > 1e-3).all()
  assert jnp.abs(first - second)[..., 1:].max() > 1e-3


def test_language_model_stores_tied_tables_once():
  tied, free = build(), build(head={"tied": False})
  assert models.size(free) - models.size(tied) == 30 * 8
  one = build(embedding={"cutoffs": (6, 15)})
  # Two entries for the clusters, with biases.
  assert models.size(one) - models.size(tied) == 2 * 8 + 2


@pytest.mark.slow
def test_build_refuses_language_models_without_causal_form():
  with pytest.raises(ValueError, match="'linformer'.*performer"):
    build("linformer")
  with pytest.raises(ValueError, match="mixer.causal=False"):
    build(mixer={"causal": False})
  with pytest.raises(ValueError, match="'language_model'.*images"):
    build(image=(8, 8, 3), patch_size=4)
  for option, value in (
    ("pool", "cls"),
    ("head_dim", 8),
    ("head_init_std", 0.02),
    ("head_dropout_rate", 0.1),
  ):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
      build(**{option: value})
  with pytest.raises(ValueError, match=r"'bound'.*tied"):
    build(head={"bound": True})
  with pytest.raises(ValueError, match="dropout_rate=1.0"):
    models.shapes(build(head={"dropout_rate": 1.0}))
  with pytest.raises(ValueError, match=r"cutoffs=\(40,\)"):
    models.shapes(build(embedding={"cutoffs": (40,)}))
