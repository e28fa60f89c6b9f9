"""Every config at size=tiny is prepared and trained for some steps."""

import math

import chex
import jax
import pytest

from jaxformers import config as c
from jaxformers.analysis.evaluation import segmentation
from jaxformers.training import loop
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer
from tests.data import scenes
from tests.marks import long_except

STEPS = 8
# What keeps a test short; but for its depth the model is the config's own.
GENERATED = {
  "lra/listops": dict(num_train=200, num_validation=20, num_test=20),
  "lra/pathfinder": dict(num_images=200),
  "lra/pathx": dict(num_images=20),
}
# One of each archive, which takes long to prepare.
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


def some_steps(name, folder, workdir, **options):
  config = c.load(f"configs/{name}.py:size=tiny")
  config.update(data_dir=str(folder), total_steps=STEPS)
  config.schedule.warmup_steps = 2
  config.batch_size = 2 if name == "lra/pathx" else 8
  config.buckets = 1  # Every length is compiled.
  config.model.num_layers = min(config.model.num_layers, 4)  # So is a layer.
  config.task.update(options)
  this = Trainer(open_run(config, workdir))
  this.begin()
  losses = []
  for batch in this.batches(0):
    this.state, sums = this.train_step(this.state, batch)
    losses.append(float(sums["objective"]))
  assert len(losses) == STEPS
  assert all(math.isfinite(loss) for loss in losses)
  assert int(this.state.step) == STEPS
  rows, *_ = jax.tree.leaves(batch["inputs"].shape)
  assert rows == config.batch_size
  return this


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(
  "name",
  long_except(("lra/listops",), GENERATED),
)
def test_without_an_archive(name, tmp_path, one_device):
  some_steps(name, tmp_path / "data", tmp_path / "run", **GENERATED[name])


def test_a_language_model_of_a_folder(tmp_path, one_device):
  (tmp_path / "text").mkdir()
  for name, words in (("train", 3_000), ("valid", 300), ("test", 300)):
    text = "\n".join(f"word {k * k % 97} and {k % 13}" for k in range(words))
    (tmp_path / "text" / f"{name}.txt").write_text(text)
  this = some_steps(
    "lm/text",
    tmp_path / "data",
    tmp_path / "run",
    archive=str(tmp_path / "text"),
    vocab_size=300,
  )
  assert this.task.info["authors_checksum"]
  assert (tmp_path / "run" / "tokenizer.json").exists()


@pytest.mark.long
def test_a_segmenter_of_a_folder(tmp_path, one_device):
  config = c.load("configs/vision/ade20k.py:model=neutreno")
  archive = scenes.write(tmp_path / "ADEChallengeData2016")
  config.task.update(archive=str(archive), window=32)
  config.task.update(num_train=12, num_test=3)
  config.update(data_dir=str(tmp_path), batch_size=2, eval_batch_size=2)
  config.update(total_steps=4, log_steps=2, eval_steps=2, checkpoint_steps=2)
  config.model.update(num_layers=2, d_model=24)
  # A step sees what it would see in a run that was taken up there.
  this = Trainer(open_run(config, tmp_path / "look"))
  *_, last = this.batches(0)
  chex.assert_trees_all_equal(next(this.batches(3)), last)
  results = loop.run(config, tmp_path / "run")
  assert 0 <= results["mean_iou"] <= 1
  assert results["metric"] == "mean_iou"
  assert results["examples"] == 3
  lines = (tmp_path / "run" / "metrics.jsonl").read_text()
  assert "validation/mean_iou" in lines
  trained = segmentation.trained.load(tmp_path / "run")
  assert segmentation.evaluate_segmenter(trained)["count"] == 3


@pytest.mark.parametrize(
  "name", long_except({*ARCHIVES} - {"vision/cifar10"}, sorted(ARCHIVES))
)
def test_from_an_archive(name, archives, prepared, tmp_path, one_device):
  file, options = ARCHIVES[name]
  options = {"archive": str(archives / file)} | options
  this = some_steps(name, prepared, tmp_path, **options)
  assert this.task.info["authors_checksum"] is False
  assert (tmp_path / "vocabulary.json").exists()
  assert (tmp_path / "tokenizer.json").exists() == name.startswith("short")
