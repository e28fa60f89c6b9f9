"""Recipes read the traits of a model from its registration."""

import subprocess
import sys

import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.models.variants import ALWAYS, bounded_models
from jaxformers.recipes import shared, traits

# A module of a user: a causal recurrence without a feed-forward, and a second
# name for the mixer of certified layers.
MINE = '''
from typing import Any

import flax.linen as nn
from jaxformers import models


@models.MIXERS.register("decay")
class Decay(nn.Module):
  """Adds nothing. Source: a test, 2026."""

  causal: bool = True

  def __call__(self, x, *, mask, carry, train):
    return x, carry


models.MODELS.register("decay")(
  models.Variant(
    "decay",
    "one_branch",
    recurrence="linear",
    count_layers=lambda d, n, layers: layers * 2 * d,  # A norm each.
  )
)
models.MODELS.register("bounded")(
  models.Variant("allpass", "contractive", bounded="always")
)
'''


@pytest.mark.parametrize("name", traits.DEFAULT_MODELS)
def test_traits_that_need_no_registry_are_those_of_the_registry(name):
  assert traits.find_traits(name) == traits.read_traits(name)


def test_traits_follow_from_the_registration():
  listed = {name: traits.find_traits(name) for name in models.MODELS}

  def having(trait):
    return {name for name, entry in listed.items() if getattr(entry, trait)}

  assert having("is_causal") == {"mamba", "rglru"}
  assert having("is_transject") == {"random_transject", "transject"}
  assert listed["linearized"].block_options == ("residual", "dropout_rate")
  assert listed["s5"].block_options == ("dropout_rate",)
  assert listed["isometric"].block_options == ()
  assert not listed["isometric"].has_mixer
  assert having("is_bounded") == {
    name for name, variant in models.MODELS.items() if variant.bounded == ALWAYS
  }


def test_an_unknown_model_is_refused_where_its_recipe_is_read():
  with pytest.raises(ValueError, match=r"model 'mambo'.*mean 'mamba'.*imports"):
    c.load("configs/lra/listops.py:model=mambo")
  with pytest.raises(ValueError, match=r"recurrence 'chunked'.*gated, linear"):
    models.Variant("mamba", recurrence="chunked")


@pytest.fixture
def mine(tmp_path, monkeypatch, request):
  """Names a module of a user, which lies in the working directory."""
  for registry in (models.MIXERS, models.MODELS):
    monkeypatch.setattr(registry, "data", dict(registry.data))
  (tmp_path / "mine_with_traits.py").write_text(MINE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  request.addfinalizer(lambda: sys.modules.pop("mine_with_traits", None))
  return ["--config.imports=mine_with_traits"]


def test_a_model_of_a_user_has_the_recipe_of_its_traits(mine):
  config = c.load_with("lra/listops:size=tiny,model=decay", mine)
  assert config.schedule.learning_rate == shared.tiny_rate("s5", 5e-3)
  assert config.model.pool == "max"  # As all recurrences.
  # Neither the mixer has a dropout rate, nor the block a feed-forward.
  assert c.plain(config.model.mixer) == {}
  assert c.plain(config.model.block) == {"dropout_rate": 0.0}
  assert c.load_with("vision/cifar10:model=decay", mine).model.pool == "mean"
  # As wide as the Transformer's 205,642 parameters allow.
  config = c.load_with("lra/listops:size=matched,model=decay", mine)
  sizes = {"vocab_size": 16, "max_len": 1_999, "num_classes": 10}
  model = models.build(**c.plain(config.model), **sizes)
  assert 205_642 - 2 * 149 < models.size(model) <= 205_642
  bounded = c.load_with("lra/image:size=tiny,model=bounded", mine)
  expected = c.load("lra/image:size=tiny,model=allpass")
  assert c.differences(c.plain(bounded), c.plain(expected)) == c.differences(
    {"model": {"name": "bounded"}, "imports": mine[0].partition("=")[2]},
    {"model": {"name": "allpass"}, "imports": ""},
  )
  assert "bounded, certified_s4d" in bounded_models()


@pytest.mark.slow
def test_help_and_runs_import_the_module_before_they_read_the_recipe(mine):
  command = [sys.executable, "-m", "jaxformers.main", *mine, "--help"]
  command += ["--config=lra/listops:size=tiny,model=decay"]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "schedule.learning_rate=0.004" in done.stdout
