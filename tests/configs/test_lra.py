"""Every config of configs/lra, with every model and size, builds a model."""

import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.training import optim

CONFIGS = ("configs/lra/listops.py", "configs/lra/text.py")
SIZES = {
  "configs/lra/listops.py": dict(vocab_size=16, max_len=1999, num_classes=10),
  "configs/lra/text.py": dict(vocab_size=257, max_len=4000, num_classes=2),
}
# Parameters by config, model and size: a change here changes what is compared.
GOLDEN = {
  ("listops", "transject", "paper"): 5_579_148,
  ("listops", "transject", "tiny"): 19_276,
  ("listops", "random_transject", "paper"): 5_317_516,
  ("listops", "random_transject", "tiny"): 18_284,
  ("listops", "transformer", "paper"): 205_642,
  ("text", "transject", "paper"): 5_639_812,
  ("text", "transject", "tiny"): 22_100,
  ("text", "random_transject", "paper"): 5_378_180,
  ("text", "random_transject", "tiny"): 21_108,
  ("text", "transformer", "paper"): 348_098,
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(("task", "model", "size"), sorted(GOLDEN))
def test_parameters_of_every_model(task, model, size):
  path = f"configs/lra/{task}.py"
  config = c.plain(c.load(f"{path}:model={model},size={size}"))
  built = models.build(**config["model"], **SIZES[path])
  assert models.size(built) == GOLDEN[task, model, size]
  optim.build(config["optimizer"], config["schedule"], config["total_steps"])


@pytest.mark.parametrize("path", CONFIGS)
@pytest.mark.parametrize("arg", ["modle=x", "size=huge", "seed=one"])
def test_a_wrong_argument_raises(path, arg):
  with pytest.raises(ValueError, match=r"Unknown|not of type"):
    c.load(f"{path}:{arg}")


def test_the_paper_size_is_the_papers():
  config = c.load("configs/lra/text.py")
  assert (config.model.d_model, config.model.num_layers) == (512, 2)
  assert (config.model.mixer.num_experts, config.model.pool) == (4, "mean")
  assert c.load("configs/lra/listops.py").model.pool == "max"
  assert (config.batch_size, config.total_steps) == (32, 50_000)


def test_every_docstring_opens_with_a_command_that_names_the_file():
  for path in CONFIGS:
    with open(path) as file:
      assert f"--config {path}" in file.read()
