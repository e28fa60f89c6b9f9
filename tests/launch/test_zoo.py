"""Training the models of the zoo anew."""

import pytest

from jaxformers.foundations import workdirs
from jaxformers.training import loop, zoo
from launch import zoo as launcher

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setattr(zoo, "FOLDER", tmp_path / "models")
  return tmp_path / "models"


def test_keep_copies_a_run_that_is_small(smoke, folder, tmp_path, monkeypatch):
  loop.run(smoke(total_steps=5), tmp_path / "run")
  kept = launcher.keep(tmp_path / "run", "listops-s5")
  assert kept == folder / "listops-s5"
  results = workdirs.read_results(kept)
  assert results["config"]["data_dir"] == ""
  local = {"config": {"data_dir": "a", "task": {"archive": "a/b.tar.gz"}}}
  assert launcher.public(local)["config"]["task"]["archive"] == "b.tar.gz"
  before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
  monkeypatch.setattr(zoo, "MOST_BYTES", 1_000)
  with pytest.raises(ValueError, match="bytes, more than 1,000: train a small"):
    launcher.keep(tmp_path / "run", "listops-s5")
  assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before


def test_zoo_launcher_refuses_an_unknown_model(
  folder, tmp_path, monkeypatch, capsys
):
  argv = [f"--workdir={tmp_path}", "--names"]
  with pytest.raises(SystemExit, match="model of the zoo 'bert'"):
    launcher.main([*argv, "bert"])
  monkeypatch.setattr(launcher.commands, "call", lambda _: 2)
  with pytest.raises(SystemExit, match="the run of listops-s5 failed"):
    launcher.main([*argv, "listops-s5"])
