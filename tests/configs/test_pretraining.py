"""Configs of configs/lra as ones of pre-training on their inputs."""

import itertools

import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.recipes import pretraining
from jaxformers.training.losses import LOSSES
from tests.assertions import assert_all
from tests.configs.test_lra import PROTOCOLS, READINGS, SIZES


def sizes_of(task, protocol, objective):
  """Sizes that `reconstruct` gives to a task."""
  sizes = {**SIZES[task], **READINGS.get((task, protocol), {})}
  ids = sizes["vocab_size"]
  is_masked = objective == "masked"
  values = not ids and task not in pretraining.AS_CLASSES
  kind = "values" if values or (not ids and not is_masked) else "tokens"
  sizes |= {"num_classes": ids or 256, "num_inputs": 1}
  sizes |= {"vocab_size": ids + is_masked if ids else 0}
  return sizes | {"objective": f"{'masked' if is_masked else 'next'}_{kind}"}


def check_objective(task, protocol, objective):
  """Fails unless a task's config of an objective builds both models."""
  model = {"masked": "transject", "causal": "transformer"}[objective]
  arguments = f"protocol={protocol},objective={objective},model={model}"
  config = c.plain(c.load(f"configs/lra/{task}.py:{arguments}"))
  sizes = sizes_of(task, protocol, objective)
  for section in ("model", "reference"):
    assert models.build(**config[section], **sizes)
  assert config["select"] in ("loss", LOSSES[sizes["objective"]].metric)
  assert config["task"]["objective"] == objective


@pytest.mark.slow
def test_pretraining_configs_build_both_objectives():
  cases = itertools.product(SIZES, PROTOCOLS, ("masked", "causal"))
  assert_all(check_objective, cases, least=60)


def test_pretraining_config_has_the_encoder_of_the_classifier():
  """At every size and under every protocol: so it can be taken over."""
  for arguments in ("size=tiny", "protocol=lra", "size=tiny,model=isometric"):
    spec = f"configs/lra/image.py:{arguments}"
    one, two = (c.load(s) for s in (spec, f"{spec},objective=masked"))
    differing = c.differences(one.model, two.model)
    assert {line.partition(":")[0] for line in differing} <= {
      "pool",
      "pool_norm",
      "head_dim",
    }
  assert c.load("configs/lra/image.py:protocol=lra").model.pool == "cls"


@pytest.mark.parametrize("task", sorted(pretraining.PUBLISHED))
def test_published_size_has_the_published_transformer_and_rates(task):
  spec = f"configs/lra/{task}.py:size=published,model=transformer"
  rates = {}
  for objective in ("", "masked", "causal"):
    config = c.load(f"{spec},objective={objective}" if objective else spec)
    rates[objective] = config.schedule.learning_rate
    sizes = (
      sizes_of(task, "jaxformers", objective) if objective else SIZES[task]
    )
    model = models.build(**c.plain(config)["model"], **sizes)
    row = pretraining.PUBLISHED[task]
    assert (model.config.d_model, model.config.num_layers) == (
      row.d_model,
      row.num_layers,
    )
    assert model.config.mixer["rotary"]
  assert rates == {
    "": row.learning_rate,
    "masked": row.masked_rate,
    "causal": row.causal_rate,
  }
  # The reference stays that of the protocol.
  assert config.reference.d_model == 64


def test_pretraining_config_refuses_an_unknown_objective():
  with pytest.raises(ValueError, match="objective='mlm'.*masked.*causal"):
    c.load("configs/lra/text.py:objective=mlm")
  with pytest.raises(ValueError, match="size=published.*'pathx'"):
    c.load("configs/lra/pathx.py:size=published,model=transformer")
