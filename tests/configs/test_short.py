"""Every config of configs/short builds a model, at the paper's sizes."""

import pytest

from jaxformers import config as c
from jaxformers import models, tasks
from tests import optimizers
from tests.marks import slow_except

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


@pytest.mark.parametrize(
  "case",
  slow_except([("imdb", "transject", "tiny")], sorted(GOLDEN)),
  ids="-".join,
)
def test_parameters_of_every_model(case):
  task, model, size = case
  config = c.plain(c.load(f"configs/short/{task}.py:model={model},size={size}"))
  built = models.build(
    **config["model"],
    vocab_size=30_522,
    max_len=512,
    num_classes=CLASSES[task],
  )
  assert models.size(built) == GOLDEN[case]
  optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )


@pytest.mark.parametrize("task", sorted(CLASSES))
def test_the_paper_size_is_the_papers(task):
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
def test_an_evaluation_an_epoch_under_every_protocol(spec, epoch):
  config = c.load(f"configs/short/{spec}")
  assert (config.eval_steps, config.total_steps) == (epoch, 30 * epoch)


@pytest.mark.parametrize("arg", ["protocol=lra", "size=huge", "modle=x"])
def test_a_wrong_argument_raises(arg):
  with pytest.raises(ValueError, match="Unknown"):
    c.load(f"configs/short/imdb.py:{arg}")


@pytest.mark.parametrize("task", sorted(CLASSES))
def test_every_option_of_a_task_is_one(task):
  options = c.plain(c.load(f"configs/short/{task}.py"))["task"]
  accepted = tasks.TASKS[options.pop("name")].__kwdefaults__
  assert options.keys() == accepted.keys() - {"data_dir"}


def test_every_docstring_opens_with_a_command_that_names_the_file():
  for task in CLASSES:
    with open(f"configs/short/{task}.py") as file:
      assert f"--config configs/short/{task}.py" in file.read()
