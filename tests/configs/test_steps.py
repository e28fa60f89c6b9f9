"""Every config at size=tiny is prepared and trained for some steps."""

import dataclasses
import math

import chex
import jax
import pytest

from jaxformers import config as c
from jaxformers import tasks
from jaxformers.analysis.evaluation import segmentation
from jaxformers.data.sets import ag_news, imdb
from jaxformers.inference import load_run
from jaxformers.training import loop
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer, begin
from tests.data import archives as layouts
from tests.data import scenes
from tests.marks import long_except

pytestmark = pytest.mark.slow

STEPS = 8
# Options that keep a test short; the model is the config's, except for depth.
GENERATED = {
  "lra/listops": dict(
    **dict(num_train=200, num_validation=20, num_test=20),
    **dict(min_length=100, max_length=500),
  ),
  "lra/pathfinder": dict(num_images=200),
  "lra/pathx": dict(num_images=20),
}
# Real archives, which take long to prepare: one of each layout.
ARCHIVES = {
  "lra/text": ("aclImdb_v1.tar.gz", {}),
  "lra/retrieval": (
    "retrieval_pairs.tar.xz",
    dict(num_train=8_000, num_validation=1_000, num_test=1_000),
  ),
  "vision/cifar10": ("cifar10_jpeg.tar.xz", {}),
  "short/ag_news": (
    "ag_news/test.csv",
    dict(vocab_size=1_000, protocol="test_only"),
  ),
}
# Archives of the same layouts with few examples, by the number of each.
SMALL_ARCHIVES = {
  "lra/text": (layouts.imdb(20), {}),
  "lra/retrieval": (
    layouts.aan({"train": 60, "validation": 6, "test": 8}),
    dict(num_train=60, num_validation=6, num_test=8),
  ),
  "short/ag_news": (
    layouts.ag_news({"train": 10, "test": 20}),
    dict(vocab_size=60, protocol="test_only"),
  ),
}


def some_steps(name, folder, workdir, **options):
  config = c.load(f"configs/{name}.py:size=tiny")
  config.update(data_dir=str(folder), total_steps=STEPS)
  config.schedule.warmup_steps = 2
  config.batch_size = 2 if name == "lra/pathx" else 8
  config.buckets = 1  # Every length is compiled, and so is every layer.
  config.model.num_layers = min(config.model.num_layers, 2)
  config.task.update(options)
  run = Trainer(open_run(config, workdir))
  begin(run.run)
  losses = []
  for batch in run.batches(0):
    run.state, sums = run.train_step(run.state, batch)
    losses.append(float(sums["objective"]))
  assert len(losses) == STEPS
  assert all(math.isfinite(loss) for loss in losses)
  assert int(run.state.step) == STEPS
  rows, *_ = jax.tree.leaves(batch["inputs"].shape)
  assert rows == config.batch_size
  return run


def check_texts(name, run, workdir):
  """A text of unknown origin is marked so, and its vocabulary is kept."""
  assert run.task.info["authors_checksum"] is not True
  assert (workdir / "vocabulary.json").exists()
  assert (workdir / "tokenizer.json").exists() == name.startswith("short")


@pytest.mark.parametrize(
  "name",
  long_except(("lra/listops",), GENERATED),
)
def test_configs_of_generated_data_train_some_steps(name, tmp_path, one_device):
  some_steps(name, tmp_path / "data", tmp_path / "run", **GENERATED[name])


def test_language_config_trains_on_a_folder(tmp_path, one_device):
  (tmp_path / "text").mkdir()
  for name, words in (("train", 3_000), ("valid", 300), ("test", 300)):
    text = "\n".join(f"word {k * k % 97} and {k % 13}" for k in range(words))
    (tmp_path / "text" / f"{name}.txt").write_text(text)
  run = some_steps(
    "lm/text",
    tmp_path / "data",
    tmp_path / "run",
    archive=str(tmp_path / "text"),
    vocab_size=300,
  )
  assert run.task.info["authors_checksum"]
  assert (tmp_path / "run" / "tokenizer.json").exists()


@pytest.mark.long
def test_segmenter_config_trains_on_a_folder(tmp_path, one_device):
  config = c.load("configs/vision/ade20k.py:model=neutreno")
  archive = scenes.write(tmp_path / "ADEChallengeData2016")
  config.task.update(archive=str(archive), window=32)
  config.task.update(num_train=12, num_test=3)
  config.update(data_dir=str(tmp_path), batch_size=2, eval_batch_size=2)
  config.update(total_steps=4, log_steps=2, eval_steps=2, checkpoint_steps=2)
  config.model.update(num_layers=2, d_model=24)
  # A step of a resumed run sees the same batch.
  run = Trainer(open_run(config, tmp_path / "look"))
  *_, last = run.batches(0)
  chex.assert_trees_all_equal(next(run.batches(3)), last)
  results = loop.run(config, tmp_path / "run")
  assert 0 <= results["mean_iou"] <= 1
  assert results["metric"] == "mean_iou"
  assert results["examples"] == 3
  lines = (tmp_path / "run" / "metrics.jsonl").read_text()
  assert "validation/mean_iou" in lines
  trained = load_run(tmp_path / "run")
  assert segmentation.evaluate_segmenter(trained)["count"] == 3


@pytest.fixture
def few(monkeypatch):
  """Lets data sets expect the few examples of the small archives."""
  monkeypatch.setattr(imdb, "PER_LABEL", 20)
  monkeypatch.setattr(ag_news, "PER_LABEL", {"train": 10, "test": 20})
  held_out = {"imdb": 8, "ag_news": 8, "test_only": 10}
  monkeypatch.setattr(tasks.short, "HELD_OUT", held_out)
  protocols = tasks.text.PROTOCOLS
  protocol = dataclasses.replace(protocols["jaxformers"], held_out=8)
  changed = protocols | {"jaxformers": protocol}
  monkeypatch.setattr(tasks.text, "PROTOCOLS", changed)


@pytest.mark.parametrize("name", sorted(SMALL_ARCHIVES))
def test_configs_train_some_steps_on_a_small_archive(
  name, few, tmp_path, one_device
):
  files, options = SMALL_ARCHIVES[name]
  path = layouts.write_tar(tmp_path / "archive.tar.gz", files)
  workdir = tmp_path / "run"
  run = some_steps(
    name, tmp_path / "data", workdir, archive=str(path), **options
  )
  check_texts(name, run, workdir)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ARCHIVES))
def test_configs_train_some_steps_on_a_real_archive(
  name, archives, prepared, tmp_path, one_device
):
  file, options = ARCHIVES[name]
  options = {"archive": str(archives / file)} | options
  run = some_steps(name, prepared, tmp_path, **options)
  check_texts(name, run, tmp_path)
