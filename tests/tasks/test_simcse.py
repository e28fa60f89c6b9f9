"""SimCSE: pairs, the correlation of SentEval, and a model that is trained."""

import jax
import numpy as np
import pytest
import scipy.stats

import jaxformers
from jaxformers import config as c
from jaxformers import models, tasks
from jaxformers.data.sets import sts12
from jaxformers.tasks import simcse
from jaxformers.training import compilers, evaluate, loop
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer
from tests import initial
from tests.data.archives import simcse as files
from tests.data.archives import write_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tmp_path_factory):
  folder = tmp_path_factory.mktemp("simcse")
  archive = write_folder(folder / "simcse", files(40))
  return dict(
    data_dir=str(folder / "data"),
    archive=str(archive),
    vocab_size=60,
    max_len=12,
    train_len=6,
  )


@pytest.fixture(scope="module")
def task(options):
  return tasks.get("simcse", **options)


def small_config(options, tmp_path, model="neutreno", **fields):
  config = c.load(f"configs/short/simcse.py:model={model}")
  options = dict(options)
  config.data_dir = options.pop("data_dir")
  config.task.update(options)
  config.update(batch_size=8, total_steps=12, buckets=2, log_steps=4)
  config.update(eval_steps=6, checkpoint_steps=6, eval_batch_size=8)
  config.update(fields)
  config.schedule.learning_rate = 5e-3
  for section in (config.model, config.reference):
    section.update(d_model=16, num_layers=1, head_dim=16)
    section.mixer_defaults.num_heads = 2
    section.block.mlp_dim = 16
  return config


def test_simcse_training_sentence_is_its_own_pair(task):
  train = task.splits["train"]
  assert len(train) == 40
  batch = train.batch(np.arange(40), 12)
  inputs = batch["inputs"]
  assert inputs.shape == (40, 2, 12)
  np.testing.assert_array_equal(inputs[:, 0], inputs[:, 1])
  assert "scores" not in batch
  # Both marks are in the greatest number of pieces.
  assert (inputs > 0).sum(2).max() == 6
  assert (inputs[:, :, 0] == task.vocabulary.index("[CLS]")).all()
  assert train.lengths().max() == 6


def test_simcse_test_split_has_all_subsets_with_scores(task):
  test, validation = task.splits["test"], task.splits["validation"]
  # Four pairs of each subset, of which one has no score.
  assert (len(test), len(validation)) == (15, 6)
  want = [f"{k % 6}.{k % 3}00" for s in range(5) for k in range(s + 1, s + 4)]
  np.testing.assert_allclose(5 * test.similarity, np.float64(want))
  np.testing.assert_allclose(5 * validation.similarity, np.arange(6) + 0.5)
  chosen = test.select(np.array([3, 1]))
  np.testing.assert_array_equal(chosen.similarity, test.similarity[[3, 1]])
  assert set(task.baselines()) == {"share of common pieces"}


def test_simcse_paper_protocol_selects_on_sts12(options):
  paper = tasks.get("simcse", protocol="paper", **options)
  assert paper.selection == "test"
  assert len(paper.splits["validation"]) == 15


def test_spearman_is_that_of_scipy():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=50), rng.integers(0, 5, 50)  # With ties.
  ranks = (scipy.stats.rankdata(a) for a in (x, y))
  want = np.corrcoef(*ranks)[0, 1]
  assert simcse.spearman(x, y) == pytest.approx(want)
  assert simcse.spearman(x, np.ones(50)) == 0


@pytest.mark.parametrize("mode", sorted(compilers.COMPILERS))
@pytest.mark.parametrize("batch_size", [4, 16])
def test_simcse_score_does_not_depend_on_devices(task, mode, batch_size):
  model = models.build("transformer", d_model=8, num_layers=1, **task.sizes())
  split = task.splits["test"]
  inputs = split.batch(np.arange(len(split)), 12)["inputs"]
  params = initial.params(model, inputs)
  vectors = np.asarray(model.apply({"params": params}, inputs, train=False))
  unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
  cosines = (unit[:, 0] * unit[:, 1]).sum(-1)
  # SentEval joins the pairs of all subsets, then ranks them.
  want = scipy.stats.spearmanr(cosines, split.similarity).statistic
  run = evaluate.Evaluator(model, mode, batch_size, (6, 12))
  scores = run(compilers.layout().place_state(params), split)
  assert scores["spearman"] == pytest.approx(want, abs=1e-6)
  error = np.square(cosines - split.similarity).mean()
  assert scores["loss"] == pytest.approx(error, rel=1e-4)
  assert scores["count"] == 15


@pytest.mark.usefixtures("at_root")
def test_simcse_loss_is_of_the_whole_batch_on_every_device(options, tmp_path):
  """The loss is that of all pairs, whichever way the step is compiled."""
  losses = []
  for mode in ("jit", "pmap"):
    # Adam would hide a gradient of another size.
    sgd = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    fields = {"parallel": mode, "optimizer": sgd, "accumulate": 1}
    config = small_config(options, tmp_path, **fields)
    config.schedule.learning_rate = 0.5
    del config.optimizer["eps"], config.optimizer["clip_norm"]
    for section in (config.model, config.reference):
      section.update(dropout_rate=0.0)
      section.mixer_defaults.dropout_rate = 0.0
      section.block.dropout_rate = 0.0
      # Vectors that differ have gradients.
      section.embedding.init_std = 1.0
      section.mixer_defaults.init_std = section.block.init_std = 0.5
    trainer = Trainer(open_run(config, tmp_path / mode))
    for _, batch in zip(range(2), trainer.batches(0), strict=False):
      trainer.state, sums = trainer.train_step(trainer.state, batch)
    params = jax.device_get(trainer.state.params)
    losses.append((float(sums["loss"]), float(sums["count"]), params))
  (first, count, params), (second, _, others) = losses
  assert count == 8
  assert first == pytest.approx(second, rel=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, others
  )
  start = jax.device_get(trainer.run.initial_state().params)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, start)
  assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.fixture
def at_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


@pytest.mark.usefixtures("at_root")
@pytest.mark.long
def test_simcse_trains_bert(options, tmp_path):
  results = loop.run(small_config(options, tmp_path), tmp_path / "run")
  assert results["metric"] == "spearman"
  assert results["examples"] == 15
  assert -1 <= results["spearman"] <= 1
  lines = (tmp_path / "run" / "metrics.jsonl").read_text()
  assert "validation/spearman" in lines
  trained = jaxformers.load(str(tmp_path / "run"))
  pairs = [("red house", "a tree"), ("blue", "green"), ("was", "is")]
  assert trained.outputs(pairs).shape == (3, 2, 16)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"train_len": 2}, "train_len=2"),
    ({"train_len": 13}, "max_len=12, train_len=13"),
    ({"protocol": "sick"}, "protocol.*'sick'"),
  ],
)
def test_simcse_task_refuses_wrong_options(options, changes, message):
  with pytest.raises(ValueError, match=message):
    tasks.get("simcse", **options | changes)


def test_simcse_without_sts_b_needs_the_paper_protocol(tmp_path):
  few = files(9)
  del few[f"STS/STSBenchmark/{sts12.VALIDATION}"]
  archive = write_folder(tmp_path / "simcse", few)
  options = dict(data_dir=str(tmp_path), archive=str(archive), vocab_size=60)
  with pytest.raises(ValueError, match="sts-dev.csv.*task.protocol=paper"):
    tasks.get("simcse", **options)
  assert tasks.get("simcse", protocol="paper", **options).selection == "test"
