"""The models that come with the package are scored again."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxformers as jf
from jaxformers import config as configs
from jaxformers import tasks
from jaxformers.commands import states
from jaxformers.commands import zoo as zoo_command
from jaxformers.foundations import workdirs
from jaxformers.training import zoo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Examples that are scored again.
COUNT = 200


def test_zoo_models_are_small_and_name_their_recipe():
  for name in zoo.RECIPES:
    folder = zoo.find(name)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= zoo.MOST_BYTES
    results = workdirs.read_results(folder)
    assert {"commit", "hardware", "config", "protocol"} <= results.keys()
  kept = {path.name for path in zoo.FOLDER.iterdir()}
  assert kept == zoo.RECIPES.keys()


def test_zoo_command_lists_models_with_scores(capsys):
  zoo_command.main([])
  printed = capsys.readouterr().out
  for name in zoo.RECIPES:
    assert f"| zoo:{name} | " in printed
  with pytest.raises(
    ValueError, match="model of the zoo 'listops'.*listops-s5"
  ):
    jf.load("zoo:listops")


def test_zoo_command_marks_models_not_installed(capsys, tmp_path, monkeypatch):
  monkeypatch.setattr(zoo, "FOLDER", tmp_path)
  zoo_command.main([])
  printed = capsys.readouterr().out
  assert printed.count("not in this installation") == len(zoo.RECIPES)


def test_load_of_a_zoo_model_as_run_names_jaxformers_load():
  with pytest.raises(ValueError, match="jaxformers.load.'zoo:listops-s5'"):
    states.load("zoo:listops-s5")


def score(name, task):
  """Score of some test examples, and what its results say.

  Accuracy; for a language model, nats a token.
  """
  model = jf.load(f"zoo:{name}")
  split = task.splits["test"]
  batch = split.batch(np.arange(min(COUNT, len(split))), task.max_len)
  outputs, targets = model.outputs(batch["inputs"]), batch["targets"]
  if "perplexity" in model.results:
    log_p = np.take_along_axis(outputs, targets[..., None], -1)[..., 0]
    nats = -np.average(log_p, weights=batch["weights"])
    return nats, np.log(model.results["perplexity"])
  return (outputs.argmax(-1) == targets).mean(), model.results["accuracy"]


@pytest.mark.long
def test_zoo_language_model_prefers_english_words():
  """Words of reviews are likelier than the same letters in another order."""
  model = jf.load("zoo:language-allpass")
  losses = []
  for text in ("one of the best movies of the year", "eht fo raey seivom tseb"):
    ids = model.encode([text])[0]
    log_p = model.outputs([text])[0]  # Of what follows each token.
    losses.append(-log_p[np.arange(len(ids) - 1), ids[1:]].mean())
  likely, unlikely = losses
  assert np.exp(likely) < model.results["perplexity"] < np.exp(unlikely)
  (text,) = model.generate(["the film is"], 8, temperature=0.5)
  assert text.isprintable()
  assert len(model.encode([text])[0]) > 1


def test_zoo_scores_of_generated_tasks_are_reproduced(data_dir):
  """The test split does not depend on the number of training examples."""
  task = tasks.get(
    "planted_pairs", data_dir=str(data_dir), num_train=10, num_validation=2
  )
  got, want = score("pairs-isometric", task)
  assert got == pytest.approx(want, abs=0.02)
  assert want > 0.99


@pytest.mark.parametrize("name", ["listops-transject", "listops-s5"])
def test_zoo_scores_of_listops_are_reproduced(name, data_dir):
  """On other expressions of the same lengths."""
  sizes = {"num_train": 8, "num_validation": 2, "num_test": COUNT, "seed": 1}
  task = tasks.get("listops", data_dir=str(data_dir), **sizes)
  got, want = score(name, task)
  # Four standard errors of so many examples.
  assert got == pytest.approx(want, abs=4 * (0.25 / COUNT) ** 0.5)


@pytest.mark.long
@pytest.mark.parametrize(
  "name", [name for name, recipe in zoo.RECIPES.items() if recipe.archive]
)
def test_zoo_scores_of_archives_are_reproduced(name, archives, prepared):
  recipe = zoo.RECIPES[name]
  fields = [field for field in recipe.fields if "task" in field]
  config = configs.load_with(recipe.config, fields)
  archive = recipe.archive.replace(
    "cifar-10-binary.tar.gz", "cifar10_jpeg.tar.xz"
  )
  task = tasks.get(
    **{
      **configs.plain(config.task),
      "archive": str(archives / archive),
      "data_dir": str(prepared),
    }
  )
  got, want = score(name, task)
  assert got == pytest.approx(want, abs=4 * (0.25 / COUNT) ** 0.5)


@pytest.mark.parametrize(
  ("path", "count"), [("docs/start.md", 7), ("README.md", 5)]
)
def test_pages_show_the_predictions_of_zoo_models(path, count):
  """Comments of the block begin with the result."""
  page = (ROOT / path).read_text()
  (block,) = re.findall(r"```python\n(.*?zoo:.*?)```", page, re.S)
  names, checked = {}, 0
  for line in block.rpartition("```python")[2].splitlines():
    code, _, comment = line.partition("  # ")
    if "=" in code.partition("(")[0] or code.startswith("import"):
      exec(code, names)
    elif comment:
      assert comment.startswith(repr(eval(code, names))), line
      checked += 1
  assert checked == count
