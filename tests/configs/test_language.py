"""Configs of language models and BERT build the published sizes."""

import math

import numpy as np
import pytest

from jaxformers import config as c
from jaxformers import models, tasks
from tests import optimizers
from tests.marks import slow_except

SIZES = {
  "lm/wikitext103": dict(vocab_size=267_736, objective="language_model"),
  "lm/text": dict(vocab_size=8_000, objective="language_model"),
  "short/bert": dict(vocab_size=30_522, max_len=512, num_classes=2),
  "short/squad": dict(
    vocab_size=30_522, max_len=384, objective="spans", separator=102
  ),
  "short/simcse": dict(
    vocab_size=30_522, max_len=128, objective="sentences", num_inputs=2
  ),
}
GOLDEN = {
  "lm/wikitext103.py:model=neutreno": 44_018_523,
  "lm/text.py": 6_860_608,
  "short/bert.py": 109_482_242,
  "short/squad.py": 108_794_882,
  "short/simcse.py": 109_185_792,
}


@pytest.mark.parametrize("spec", slow_except(("lm/text.py",), sorted(GOLDEN)))
@pytest.mark.slow
def test_language_configs_have_the_published_parameters(spec):
  config = c.plain(c.load(f"configs/{spec}"))
  sizes = {"max_len": 256, "num_classes": 0} | SIZES[spec.partition(".py")[0]]
  model = models.build(**config["model"], **sizes)
  assert models.size(model) == GOLDEN[spec]
  assert models.build(**config["reference"], **sizes)
  optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  accepted = tasks.TASKS[config["task"].pop("name")].__kwdefaults__
  assert config["task"].keys() == accepted.keys() - {"data_dir"}


def test_bert_config_has_the_published_fine_tuning():
  """Devlin et al. 2019, appendix A.2, and run_classifier.py of their code."""
  config = c.load("configs/short/bert.py")
  total = config.total_steps
  assert total == 3 * math.ceil(22_500 / 32)
  _, rate = optimizers.build(config.optimizer, config.schedule, total)
  top = config.schedule.warmup_steps
  assert top == pytest.approx(total / 10, abs=1)
  rates = [float(rate(step)) for step in (0, top, (top + total) / 2, total)]
  np.testing.assert_allclose(rates, [0, 2e-5, 1e-5, 0], atol=1e-11)
  for model in (config.model, config.reference):
    assert (model.head_dropout_rate, model.head_init_std) == (0.1, 0.02)
  assert (config.optimizer.eps, config.optimizer.weight_decay) == (1e-6, 0.01)


def test_simcse_config_has_the_published_training():
  """Gao et al. 2021, appendix A, for BERT-base without supervision."""
  config = c.load("configs/short/simcse.py")
  assert (config.batch_size, config.total_steps) == (64, 10**6 // 64)
  assert (config.schedule.learning_rate, config.task.train_len) == (3e-5, 32)
  assert (config.eval_steps, config.select) == (250, "spearman")
  squad = c.load("configs/short/squad.py:protocol=paper")
  assert squad.total_steps == 3 * math.ceil(87_599 / 32)
  assert (squad.task.max_len, squad.task.stride) == (384, 128)


def test_wikitext_config_has_neutreno_settings():
  config = c.load("configs/lm/wikitext103.py:model=neutreno")
  assert config.model.mixer.fidelity == 0.4
  assert not config.model.block.norm_first
  assert (config.batch_size, config.total_steps) == (96, 500_000)
  assert config.optimizer.clip_norm == 0.25
  for model in (config.model, config.reference):
    # --dropout 0.1 --dropatt 0.0 of the authors' script.
    rates = (model.dropout_rate, model.block.dropout_rate)
    assert (*rates, model.head.dropout_rate) == (0.1, 0.1, 0.1)
    assert model.mixer_defaults.dropout_rate == 0
  assert c.load("configs/lm/text.py").select == "perplexity"


@pytest.mark.parametrize(
  "spec", ["wikitext103.py", "text.py", "text.py:size=tiny"]
)
def test_language_configs_scale_token_embeddings_against_positions(spec):
  model = c.load(f"configs/lm/{spec}").model
  token = (model.embedding.get("init_std", 0) or 0.02) * model.embedding.scale
  position = {"learned": 0.02, "sinusoid": 0.5**0.5}[model.positions]
  assert token > 0.3 * position
