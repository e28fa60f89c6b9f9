import json
import types

import chex
import jax
import numpy as np
import pytest

from jaxformers.commands import states
from jaxformers.foundations import workdirs
from jaxformers.training import loop
from jaxformers.training.run import open_run
from jaxformers.training.trainer import begin

pytestmark = pytest.mark.slow


def test_load_scores_as_the_run_did(smoke, tmp_path):
  results = loop.run(smoke(ema_decay=0.9), tmp_path / "run")
  run = states.load(tmp_path / "run")
  held = run.task.splits["validation"]
  ids = held.batch(np.arange(len(held)), run.task.max_len)["inputs"]
  logits = run.apply(8)(ids)
  log_p = jax.nn.log_softmax(logits)[np.arange(len(held)), held.labels]
  rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  losses = {
    row["step"]: row["validation/loss"]
    for row in map(json.loads, rows)
    if "validation/loss" in row
  }
  assert losses[run.step] == pytest.approx(float(-log_p.mean()), rel=1e-5)
  assert run.step == results["best_step"]
  epochs = run.step * run.run.config.batch_size / len(run.task.splits["train"])
  assert results["scored"] == {"split": "test", "epochs": round(epochs, 4)}
  assert run.config["name"] == "transject"
  ids = run.sample(100, 1_000)  # More than there are, and longer.
  test = run.task.splits["test"]
  assert ids.shape == (len(test), run.task.max_len)
  logits = run.apply(8)(ids)
  right = np.mean(np.argmax(logits, -1) == test.labels)
  assert right == pytest.approx(results["accuracy"])
  drawn = run.sample(3, 7, seed=1)
  assert drawn.shape == (3, 7)
  np.testing.assert_array_equal(drawn, run.sample(3, 7, seed=1))
  assert not np.array_equal(drawn, run.sample(3, 7, seed=2))
  # Where it began has the same form, and is not where it came.
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), run.start, run.params)
  assert any(jax.tree.leaves(moved))
  alone = states.load(tmp_path / "run")
  chex.assert_trees_all_equal(*map(jax.device_get, (alone.params, run.params)))


def test_load_refuses_a_folder_without_a_run(tmp_path):
  with pytest.raises(ValueError, match="There is no run in"):
    states.load(tmp_path)


def test_load_refuses_a_run_without_evaluated_checkpoint(smoke, tmp_path):
  # Writes the config, and nothing more.
  begin(open_run(smoke(), tmp_path.absolute()))
  with pytest.raises(ValueError, match="no checkpoint in"):
    states.load(tmp_path)


@pytest.fixture(scope="module")
def softmax(smoke, tmp_path_factory):
  """A trained run of a Transformer; do not write there."""
  workdir = tmp_path_factory.mktemp("softmax") / "run"
  loop.run(smoke("transformer"), workdir)
  return workdir


@pytest.mark.slow
def test_load_of_untrained_state_has_step_0(softmax):
  run, start = states.load(softmax), states.load(softmax, untrained=True)
  chex.assert_trees_all_equal(start.params, run.start)
  assert start.step == 0


@pytest.mark.slow
def test_load_softmax_weights_as_another_model(softmax):
  """Its weights, with the options of the other one."""
  run = states.load(softmax)
  held, none = (
    states.load(softmax, model="neutreno", options=f"mixer.fidelity={x}")
    for x in (0.6, 0)
  )
  chex.assert_trees_all_equal(*map(jax.device_get, (run.params, held.params)))
  assert held.config["mixer"]["fidelity"] == 0.6
  assert held.step == run.step
  ids = run.sample(4, 20)
  logits = [np.asarray(each.apply(4)(ids)) for each in (run, none, held)]
  np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
  assert np.abs(logits[0] - logits[2]).max() > 1e-4


@pytest.mark.slow
def test_load_weights_of_another_run(softmax, smoke, tmp_path):
  loop.run(smoke("transformer", seed=1, total_steps=5), tmp_path / "other")
  other = states.load(tmp_path / "other")
  run = states.load(softmax, pretrained=tmp_path / "other")
  chex.assert_trees_all_equal(*map(jax.device_get, (run.params, other.params)))
  assert run.folder == softmax


@pytest.mark.slow
def test_load_of_other_weights_names_the_options_that_differ(
  softmax, smoke, tmp_path, capsys
):
  config = smoke(
    "transformer", total_steps=5, **{"model.block.activation": "relu"}
  )
  loop.run(config, tmp_path / "other")
  capsys.readouterr()
  states.load(softmax, pretrained=tmp_path / "other")
  assert (
    "Differs: block.activation: 'relu' -> 'absent'." in capsys.readouterr().err
  )


@pytest.mark.parametrize(
  ("state", "message"),
  [
    ({"untrained": True, "model": "neutreno"}, "--untrained.*--pretrained"),
    ({"options": "fidelity"}, "--options=fidelity.*NAME=VALUE"),
    ({"options": "mixer.fidelitty=1"}, "fidelitty"),
    ({"options": "d_model.x=3"}, "d_model is no section: write d_model=VALUE"),
    (
      {"model": "linformer", "options": "mixer.rank=4"},
      "(?s)layer_0/mixer/project_keys",
    ),
    ({"pretrained": "nowhere"}, "nowhere.*config.json"),
  ],
)
def test_load_refuses_states_a_run_does_not_have(softmax, state, message):
  with pytest.raises(ValueError, match=message):
    states.load(softmax, **state)


def test_states_lists_and_describes_what_to_compare():
  given = {"untrained": True, "pretrained": "", "model": "", "options": "a=1"}
  found = states.states(given)
  assert [states.describe(state) for state in found] == [
    "",
    "untrained",
    "a=1",
  ]
  with_model = {**given, "untrained": False, "model": "b", "pretrained": "c"}
  assert states.describe(with_model) == "as b with c a=1"
  assert len(states.states({**given, "options": "", "untrained": False})) == 1


def test_record_keeps_scores_of_the_trained_state_only(
  tmp_path, capsys, monkeypatch
):
  run = types.SimpleNamespace(step=7)
  (best, start) = states.states(
    {"untrained": True, "pretrained": "", "model": "", "options": ""}
  )
  scores = {"perplexity": 2.0, "loss": float("nan")}

  def record(state):
    states.record(run, tmp_path, state, "perplexity", scores, 9, stride=1)
    return workdirs.read_scores(tmp_path)

  assert not record(best)  # The run has not ended.
  (tmp_path / "results.json").touch()
  assert not record(start)
  assert record(best) == [
    {
      "command": "perplexity",
      "how": {"stride": 1},
      "step": 7,
      "examples": 9,
      "scores": {"perplexity": 2.0},
    }
  ]

  def refuse(*_):
    raise OSError("read-only")

  monkeypatch.setattr(workdirs, "add_score", refuse)
  record(best)
  assert "read-only" in capsys.readouterr().err
