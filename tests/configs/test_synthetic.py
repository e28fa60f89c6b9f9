"""Configs of configs/synthetic build a model."""

import pytest

from jaxformers import config as c
from jaxformers import models


@pytest.mark.parametrize("model", ["isometric", "transject", "s5"])
@pytest.mark.slow
def test_pairs_config_builds_every_model(model):
  config = c.load(f"configs/synthetic/planted_pairs.py:model={model}")
  sizes = dict(vocab_size=4, max_len=config.task.length, num_classes=2)
  built = models.build(**c.plain(config.model), **sizes)
  assert models.size(built) < 100_000
  assert config.task.distance == 19
