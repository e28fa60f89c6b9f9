"""Every config of configs/short builds a model, at the paper's sizes."""

import pytest

from jaxformers import config as c
from jaxformers import models, tasks
from tests import optimizers
from tests.assertions import assert_all

CLASSES = {"imdb": 2, "ag_news": 4}
GOLDEN = {
  ("imdb", "transject", "paper"): 23_814_664,
  ("imdb", "transject", "tiny"): 1_030_468,
  ("imdb", "random_transject", "paper"): 23_553_032,
  ("imdb", "random_transject", "tiny"): 1_026_436,
  ("imdb", "transformer", "paper"): 34_543_618,
  ("imdb", "transformer", "tiny"): 2_020_610,
  ("ag_news", "transject", "paper"): 23_815_690,
  ("ag_news", "transject", "tiny"): 1_030_598,
  ("ag_news", "random_transject", "paper"): 23_554_058,
  ("ag_news", "random_transject", "tiny"): 1_026_566,
  ("ag_news", "transformer", "paper"): 34_544_644,
  ("ag_news", "transformer", "tiny"): 2_020_740,
}


def check_parameters(task, model, size, count):
  """Fails unless a config's model has a number of parameters."""
  config = c.plain(c.load(f"configs/short/{task}.py:model={model},size={size}"))
  optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  sizes = dict(vocab_size=30_522, max_len=512, num_classes=CLASSES[task])
  assert models.size(models.build(**config["model"], **sizes)) == count


@pytest.mark.slow
def test_short_configs_have_the_expected_parameters():
  cases = [(*case, count) for case, count in GOLDEN.items()]
  assert_all(check_parameters, cases, least=12)


@pytest.mark.parametrize("task", sorted(CLASSES))
def test_short_configs_have_the_sizes_of_the_paper(task):
  config = c.load(f"configs/short/{task}.py")
  model = config.model
  assert (model.num_layers, model.mixer.num_experts) == (6, 4)
  assert (model.d_model, model.pool, config.task.max_len) == (512, "mean", 512)
  adam = config.optimizer
  assert (adam.name, adam.b2, adam.eps) == ("adam", 0.98, 1e-9)
  assert (config.schedule.learning_rate, config.batch_size) == (5e-4, 32)
  assert config.schedule.name == "constant"
  assert config.total_steps == 30 * config.eval_steps
  assert config.patience == 4
  examples = {"imdb": 22_500, "ag_news": 108_000}[task]
  assert config.eval_steps == -(-examples // 32)
  # The paper stops by the loss of the test split.
  assert c.load(f"configs/short/{task}.py:protocol=paper").select == "loss"


@pytest.mark.parametrize(
  ("spec", "epoch"),
  [
    ("imdb.py:protocol=paper", 782),
    ("ag_news.py:protocol=paper", 3_750),
    ("ag_news.py:protocol=test_only", 175),
  ],
)
def test_short_configs_evaluate_once_an_epoch(spec, epoch):
  config = c.load(f"configs/short/{spec}")
  assert (config.eval_steps, config.total_steps) == (epoch, 30 * epoch)


@pytest.mark.parametrize(
  ("arg", "message"),
  [
    ("protocol=lra", "protocol.*lra.*paper"),
    ("size=huge", "size.*huge.*paper"),
    ("modle=x", "modle.*model"),
  ],
)
def test_short_configs_refuse_wrong_arguments(arg, message):
  with pytest.raises(ValueError, match=message):
    c.load(f"configs/short/imdb.py:{arg}")


@pytest.mark.parametrize("task", sorted(CLASSES))
def test_short_configs_set_all_options_of_their_task(task):
  options = c.plain(c.load(f"configs/short/{task}.py"))["task"]
  accepted = tasks.TASKS[options.pop("name")].__kwdefaults__
  assert options.keys() == accepted.keys() - {"data_dir"}


def test_short_config_docstrings_name_their_file():
  for task in CLASSES:
    with open(f"configs/short/{task}.py") as file:
      assert f"jaxformers train short/{task}" in file.read()
