"""Weights that are read without the program and the data of their run."""

import json

import chex
import jax
import pytest

from jaxformers.training import loop, run, weights
from jaxformers.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def folder(smoke, tmp_path_factory):
  """A trained run; do not write there."""
  path = tmp_path_factory.mktemp("weights") / "run"
  loop.run(smoke(total_steps=4, eval_steps=2), path)
  return path


@pytest.mark.slow
def test_read_weights_needs_no_data_and_no_model(folder, monkeypatch):
  opened = run.open_trained_run(folder)
  with Checkpoints(folder, opened.task.description(), opened.config) as saved:
    best = saved.restore_best(opened.layout.place_state(opened.initial_state()))
  monkeypatch.setattr(run.tasks, "get", None)
  monkeypatch.setattr(run.models, "build", None)
  read = weights.read_weights(folder)
  chex.assert_trees_all_equal(jax.device_get(best.state.scored), read.params)
  assert read.vocabulary[1] == "[MIN"
  assert read.step == best.step
  assert read.objective == "classification"


def test_read_weights_of_another_folder_is_none(tmp_path):
  assert weights.read_weights(tmp_path) is None
  (tmp_path / "config.json").write_text(json.dumps([1]))
  assert not weights.is_run(tmp_path)
  assert weights.read_weights(tmp_path) is None
