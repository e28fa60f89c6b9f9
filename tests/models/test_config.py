"""The configuration of a model, kept on the model."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformers import models
from jaxformers.models.config import FIELDS, ModelConfig
from tests import initial

SIZES = dict(vocab_size=20, max_len=8, num_classes=3, d_model=8, num_layers=2)
IDS = jnp.ones((2, 5), jnp.int32)


def test_from_config_keeps_the_config_on_the_model():
  config = ModelConfig("transformer", **SIZES, mixer={"num_heads": 4})
  model = models.from_config(config)
  assert model.config is config
  assert model == models.build("transformer", **SIZES, mixer={"num_heads": 4})


def test_in_float32_replaces_the_dtype_only():
  half = models.build("transject", **SIZES, dtype="bfloat16")
  single = models.from_config(dataclasses.replace(half.config, dtype="float32"))
  assert single == models.in_float32(half)
  assert single == models.build("transject", **SIZES)
  chex.assert_trees_all_equal_shapes(models.shapes(half), models.shapes(single))


def test_model_config_replace_checks_the_dtype():
  config = models.build("transformer", **SIZES).config
  with pytest.raises(ValueError, match="dtype.*'float16'"):
    dataclasses.replace(config, dtype="float16")
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.d_model = 16


def test_model_config_with_lists_is_hashable():
  config = ModelConfig(
    "transformer", **SIZES, embedding={"cutoffs": [5, 10], "div_value": 2}
  )
  assert hash(config) == hash(dataclasses.replace(config))
  assert config.embedding["cutoffs"] == (5, 10)


def test_check_names_names_a_missing_size():
  models.check_names({"name": "transformer", "d_model": 8, "num_layers": 1})
  with pytest.raises(ValueError, match="config.model.*num_layers"):
    models.check_names({"name": "transformer", "d_model": 8})
  with pytest.raises(ValueError, match="config.model.*'d_modl'.*'d_model'"):
    models.check_names({"name": "transformer", "d_modl": 8})


@pytest.mark.slow
def test_memory_modes_have_the_same_parameters_and_outputs():
  stored = models.build("transject", **SIZES)
  params = initial.params(stored, IDS)
  for memory in ("recomputed", "reversible"):
    config = dataclasses.replace(stored.config, memory=memory)
    model = models.from_config(config)
    chex.assert_trees_all_close(
      jax.jit(lambda m=model: m.apply({"params": params}, IDS, train=False))(),
      stored.apply({"params": params}, IDS, train=False),
      atol=1e-5,
    )


def test_model_config_fields_are_arguments_of_build():
  assert {"name", "d_model", "mixer", "memory"} <= {*FIELDS}


def test_build_refuses_batch_norm_for_language_models():
  """Its mean would show later tokens to earlier ones."""
  with pytest.raises(ValueError, match='norm_type="batch".*later'):
    models.build(
      "lru",
      vocab_size=9,
      max_len=8,
      num_classes=0,
      d_model=8,
      num_layers=1,
      objective="language_model",
      block={"norm_type": "batch"},
    )


def test_positions_of_an_image_that_is_no_square_are_refused():
  options = {"vocab_size": 0, "image": (2, 8, 3), "patch_size": 1}
  with pytest.raises(ValueError, match="sinusoid_2d.*not square"):
    ModelConfig(name="transformer", **SIZES | options, positions="sinusoid_2d")


def test_is_causal_follows_the_mixer_not_the_objective():
  """A classifier's mixer may read earlier tokens only."""

  def make(name, **options):
    return ModelConfig(name=name, **SIZES | options)

  for options, must_be_causal, is_causal in (
    ({}, False, False),
    ({"mixer": {"causal": True}}, False, True),
    ({"objective": "next_tokens"}, True, True),
  ):
    config = make("transformer", **options)
    assert config.must_be_causal == must_be_causal, options
    assert config.is_causal == is_causal, options
  # One has a causal form only, one has no mixer, and one no causal form.
  assert make("mamba").is_causal
  assert not make("isometric").is_causal
  assert not make("linformer").is_causal
