"""The names of models, and what they stand for."""

import pytest

from jaxformers.models.attention import MIXERS
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.variants import MODELS, Variant


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_name_stands_for_a_mixer_in_a_block(name):
  variant = MODELS[name]
  assert variant.block in BLOCKS
  options = {**variant.fixed, **variant.defaults}
  assert options.keys() <= {*getattr(MIXERS[variant.mixer], "options", options)}


def test_every_mixer_has_a_model():
  assert {variant.mixer for variant in MODELS.values()} == {*MIXERS}


def test_names_of_papers_stand_for_their_options():
  assert MODELS["transformer"] == Variant("softmax", "pre_norm", {}, {})
  assert MODELS["transformer_rezero"].block == "rezero"
  assert MODELS["transformer_orthogonal"].fixed == {"orthogonal": True}
  assert MODELS["neutreno"].defaults == {"fidelity": 0.6}
  assert MODELS["symmetric_transformer"].fixed == {"symmetric": True}
  assert MODELS["linearized"].block == "attention_only"
  assert MODELS["linear_transformer"].mixer == "linear"
  assert MODELS["transject"].block == "injective"
  random = Variant("transject", "injective", {"sigma": "learned"})
  assert MODELS["random_transject"] == random
