"""Configs of configs/diagnostics: models, lengths, and a run to its scores."""

import numpy as np
import pytest

import jaxformers as jf
from jaxformers import config as c
from jaxformers import models
from jaxformers.analysis.page import overview
from jaxformers.analysis.tables import results, runs
from jaxformers.foundations.errors import UserError
from jaxformers.training import run

SHORT = {
  "total_steps": 4,
  "eval_steps": 4,
  "checkpoint_steps": 4,
  "schedule.warmup_steps": 1,
  "batch_size": 8,
  "eval_batch_size": 8,
  "model.d_model": 8,
  "model.num_layers": 1,
}


@pytest.mark.parametrize(
  "task", ["state_tracking", "recall", "formal_languages"]
)
@pytest.mark.parametrize(
  "model", ["transject", "isometric", "mamba", "neutreno"]
)
@pytest.mark.slow
def test_diagnostics_build_models_in_their_causal_form(task, model):
  config = c.load(f"configs/diagnostics/{task}.py:model={model}")
  sizes = dict(vocab_size=8, max_len=64, num_classes=6)
  sizes |= {"causal": config.task.causal, "objective": "token_classification"}
  built = models.build(**c.plain(config.model), **sizes)
  assert built.config.is_causal == (model in ("mamba", "neutreno"))
  # TransJect's layers reserve channels for positions.
  has_positions = model == "transject"
  assert built.config.positions == ("sinusoid" if has_positions else "none")
  assert models.size(built) < 200_000


def test_learned_positions_cannot_read_longer_tests():
  config = c.load_with(
    "diagnostics/state_tracking", ["--config.model.positions=learned"]
  )
  with pytest.raises(UserError, match="no trained positions"):
    run.check_fields(c.RunConfig.from_dict(config))


def test_weights_of_positions_cannot_read_longer_tests():
  spec = "diagnostics/state_tracking:model=synthesizer"
  config = c.load_with(spec, [])
  assert tuple(config.task.test_lengths) == (64,)
  run.check_fields(c.RunConfig.from_dict(config))
  config = c.load_with(spec, ["--config.task.test_lengths=(64, 128)"])
  with pytest.raises(UserError, match="'synthesizer' has no trained weights"):
    run.check_fields(c.RunConfig.from_dict(config))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("diagnostics")
  options = SHORT | {
    "task.num_train": 20,
    "task.num_validation": 8,
    "task.num_test": 8,
    "task.min_length": 8,
    "task.length": 8,
    "task.test_lengths": (8, 16),
    "data_dir": str(folder / "data"),
  }
  spec = "diagnostics/state_tracking:problem=Z2,model=s5"
  return jf.train(spec, folder / "run", options=options)


@pytest.mark.slow
def test_results_have_scores_by_length(trained):
  scores = trained.results["by_length"]
  assert [*scores] == ["8", "16"]
  for each in scores.values():
    assert each["count"] == 8
    assert 0 <= each["sequence_accuracy"] <= each["accuracy"] <= 1
  beyond = trained.results["accuracy_beyond"]
  assert beyond == scores["16"]["accuracy"]
  assert trained.results["state_bytes"] > 0
  (row,) = results.summarise([trained.results])
  assert row["by_length"]["accuracy"][16][0] == pytest.approx(
    100 * scores["16"]["accuracy"]
  )
  text = results.markdown([row])
  assert "sequence accuracy % by length" in text
  groups = runs.group_by_recipe(runs.discover([trained.folder])[0])
  figure = overview.by_length(groups)
  assert {r[3] for r in figure.rows} == {8, 16}


@pytest.mark.slow
def test_predict_returns_a_label_for_every_token(trained):
  ids = [[1, 2, 2, 1], [2, 2, 0, 0]]
  first, second = trained.predict(ids)
  assert (len(first.labels), len(second.labels)) == (4, 2)
  assert first.probabilities.shape == (4, 2)
  np.testing.assert_allclose(first.probabilities.sum(1), 1, rtol=1e-5)
  assert set(first.labels) <= {"0", "1"}
  # Padding before and between tokens changes nothing.
  (padded,) = trained.predict([[0, 1, 0, 2, 2, 1]])
  assert padded.labels == first.labels
  np.testing.assert_allclose(
    padded.probabilities, first.probabilities, atol=1e-5
  )
  # A causal model predicts the same for a part of the sequence.
  (part,) = trained.predict([[1, 2]])
  np.testing.assert_allclose(
    part.probabilities, first.probabilities[:2], atol=1e-5
  )


@pytest.mark.slow
def test_train_on_labels_of_tokens_in_memory(tmp_path):
  ids = [[1 + k % 3, 2, 1] for k in range(30)]
  labels = [["odd", None, "even"]] * 30
  model = jf.train(
    "diagnostics/recall:model=transformer",
    tmp_path,
    train=(ids, labels),
    options=SHORT | {"model.positions": "learned"},
  )
  (prediction,) = model.predict([[1, 2, 1]])
  assert set(prediction.labels) <= {"odd", "even"}
  assert not model.model.config.causal
  assert "by_length" not in model.results


def test_a_task_without_a_causal_form_is_refused_before_training():
  config = c.load("configs/diagnostics/recall.py:model=transformer")
  sizes = dict(vocab_size=8, max_len=64, num_classes=6, causal=True)
  fields = {**c.plain(config.model), "name": "linformer"}
  with pytest.raises(UserError, match="no causal form"):
    models.build(**fields, objective="token_classification", **sizes)
