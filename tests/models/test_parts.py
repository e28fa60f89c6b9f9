"""From a config to the modules of an encoder."""

import pytest

from jaxformers import models
from jaxformers.models import parts
from jaxformers.models.config import ModelConfig

SIZES = dict(vocab_size=20, max_len=8, num_classes=3, d_model=8, num_layers=2)


def test_options_reach_mixer_and_block():
  config = ModelConfig(
    "transformer",
    **SIZES,
    mixer={"num_heads": 4},
    block={"mlp_dim": 24},
    dtype="bfloat16",
  )
  block = parts.encoder_block(config)(parent=None)
  assert (block.mlp_dim, block.num_layers) == (24, 2)
  assert block.dtype == block.mixer(parent=None).dtype == "bfloat16"
  assert block.mixer(parent=None).num_heads == 4


def test_the_longest_input_is_traced():
  config = ModelConfig("linformer", **SIZES, mixer={"rank": 9})
  with pytest.raises(ValueError, match=r"rank=9.*max_len=8"):
    parts.check(config)
  with pytest.raises(ValueError, match="rank=9"):
    models.build("linformer", **SIZES, mixer={"rank": 9})


def test_a_token_in_front_counts():
  config = ModelConfig("linformer", **SIZES, mixer={"rank": 9}, pool="cls")
  parts.check(config)
