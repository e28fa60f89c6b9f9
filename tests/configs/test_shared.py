"""Recipes agree with the registry of models."""

import pytest

from jaxformers import models
from jaxformers.recipes import shared


@pytest.mark.parametrize(
  ("names", "block"),
  [
    (shared.TRANSJECTS, "injective"),
    (shared.ATTENTION_ONLY, "attention_only"),
  ],
)
def test_models_of_a_block(names, block):
  registered = {k for k, v in models.MODELS.items() if v.block == block}
  assert registered == {*names}


def test_tiny_rates_are_of_a_kind():
  assert shared.tiny_rate("random_transject", 5e-3) == 5e-3
  assert shared.tiny_rate("transformer", 5e-3) == 1e-3
  assert shared.tiny_rate("s5", 5e-3) == 4e-3


def test_tiny_fields_override_the_schedule():
  fields = shared.tiny_fields(
    "transject", learning_rate=5e-3, total_steps=50, eval_steps=7
  )
  assert fields["eval_steps"] == 7
  assert fields["schedule"]["warmup_steps"] == 5
  with pytest.raises(ValueError, match="Unknown size 'huge'.*paper, tiny"):
    shared.is_tiny("huge")
