"""Runs of a grid: what is run, what is not run again, and what is refused."""

import json
import os
import sys
from pathlib import Path

import pytest

from jaxformers.foundations.errors import UserError
from jaxformers.sweep.grid import Cell
from jaxformers.sweep.runs import Sweep, find_ends
from launch import sweep
from tests.sweep.conftest import describe_task

pytestmark = pytest.mark.slow

SPEC = "configs/lra/listops.py:size=tiny"


def test_sweep_skips_runs_with_results(runs, tmp_path, capsys):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=0,1"]
  sweep.main([*argv, "--grid=model=transject,local"])
  assert len(runs.commands) == 4
  sweep.main([*argv, "--grid=model=transject,local,sparse"])
  assert [spec.rpartition("=")[2] for spec, _ in runs.commands[4:]] == [
    "sparse",
    "sparse",
  ]
  assert capsys.readouterr().out.count("| 50.00 +- 0.00 | 0 1 |") == 2 + 3


def test_sweep_refuses_results_of_another_config(runs, tmp_path):
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  argv.append("--config.schedule.warmup_steps=2")
  sweep.main([*argv, "--config.total_steps=5"])
  with pytest.raises(SystemExit, match="(?s)results.json.*total_steps: 5 -> 6"):
    sweep.main([*argv, "--config.total_steps=6", "--seeds=1,0"])
  assert len(runs.commands) == 1
  sweep.main([*argv, "--config.total_steps=5", "--config.data_dir=elsewhere"])
  assert len(runs.commands) == 1


def test_sweep_refuses_results_of_other_data(runs, tmp_path):
  argv = ["--config", "configs/lm/text.py", f"--workdir={tmp_path}"]
  sweep.main([*argv, "--config.task.archive=one"])
  with pytest.raises(
    SystemExit, match="(?s)results.json.*data: 'one' -> 'two'"
  ):
    sweep.main([*argv, "--config.task.archive=two"])
  assert len(runs.commands) == 1


def test_sweep_checks_data_before_running(tmp_path):
  argv = ["--config", "configs/lm/text.py", f"--workdir={tmp_path}"]
  with pytest.raises(SystemExit, match="text.*--config.task.archive"):
    sweep.main(argv)
  with pytest.raises(SystemExit, match="error.*nowhere"):
    sweep.main([*argv, "--config.task.archive=nowhere"])


def test_sweep_tunes_by_the_selection_split_of_the_first_seed(
  runs, tmp_path, capsys
):
  models = ("transject", "local", "sparse")
  for model, score in zip(models, (0.4, 0.6, 0.5), strict=True):
    runs.scores[f"{SPEC},model={model}", 3] = score
    runs.scores[f"{SPEC},model={model}", 4] = 1 - score
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=3,4"]
  sweep.main([*argv, f"--tune=model={','.join(models)}"])
  assert runs.commands == [
    *((f"{SPEC},model={model}", 3) for model in models),
    (f"{SPEC},model=local", 4),
  ]
  said = capsys.readouterr().out
  assert "model=local, by accuracy: transject: 0.4000, local: 0.6" in said
  assert "at the end" not in said
  assert "| 50.00 +- 14.14 | 3 4 |" in said
  # The score of a loss is below 0.
  for model, loss in zip(models, (0.4, 0.6, 0.5), strict=True):
    runs.scores[f"{SPEC},model={model}", 3] = -loss
  sweep.main(
    [
      "--config",
      SPEC,
      f"--workdir={tmp_path / 'loss'}",
      "--seeds=3",
      "--config.select=loss",
      f"--tune=model={','.join(models)}",
    ]
  )
  said = capsys.readouterr().out
  assert "model=transject, by loss: transject: 0.4000, loc" in said


def test_sweep_continues_after_a_failed_run(runs, tmp_path, capsys):
  runs.broken[f"{SPEC},model=local"] = 1
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  with pytest.raises(SystemExit, match="model=local.seed_0: 1"):
    sweep.main([*argv, "--grid=model=local,sparse"])
  assert len(runs.commands) == 2
  assert "| 50.00 | 0 |" in capsys.readouterr().out
  # Of what is tuned, no value is chosen while a run failed.
  tuned = [*argv, "--tune=model=local,sparse", "--seeds=0,1"]
  with pytest.raises(SystemExit, match="model=local.seed_0: 1"):
    sweep.main(tuned)
  assert (f"{SPEC},model=sparse", 1) not in runs.commands
  # One that diverges is left out; that is no failure.
  runs.broken[f"{SPEC},model=local"] = 2
  sweep.main(tuned)
  assert runs.commands[-1] == (f"{SPEC},model=sparse", 1)
  assert "left out: " in capsys.readouterr().out
  with pytest.raises(SystemExit, match="model=local.seed_0: 2"):
    sweep.main([*argv, "--tune=model=local"])


def test_sweep_varies_fields_and_sets_them_for_chosen_runs(runs, tmp_path):
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  argv += ["--grid=model=transject,local", "--grid=model.num_layers=1,2"]
  sweep.main([*argv, "--set=model=local,model.num_layers=2:batch_size=8"])
  found = {
    path.parent.parent.name: json.loads(path.read_text())["config"]
    for path in tmp_path.rglob("results.json")
  }
  assert {
    name: (config["model"]["num_layers"], config["batch_size"])
    for name, config in found.items()
  } == {
    "size=tiny,model=transject,model.num_layers=1": (1, 32),
    "size=tiny,model=transject,model.num_layers=2": (2, 32),
    "size=tiny,model=local,model.num_layers=1": (1, 32),
    "size=tiny,model=local,model.num_layers=2": (2, 8),
  }


def test_sweep_names_missing_data_and_runs_the_rest(
  runs, tmp_path, monkeypatch, capsys
):
  def describe(self, config):
    if config.task.name == "text":
      raise UserError("No archive of Text.")
    return describe_task(self, config)

  monkeypatch.setattr(Sweep, "describe_task", describe)
  argv = ["--config=configs/lra/text.py", "--config", SPEC]
  argv += [f"--workdir={tmp_path}"]
  sweep.main(argv)
  said = capsys.readouterr()
  assert "configs/lra/text.py: No archive of Text" in said.err
  assert "| 50.00 | 0 |" in said.out
  assert [spec for spec, _ in runs.commands] == [SPEC]
  with pytest.raises(SystemExit) as stopped:
    sweep.main([*argv, "--strict"])
  assert stopped.value.code == 1
  # A value of the tuned axis that has no data leaves out its cell.
  capsys.readouterr()
  sweep.main([*argv, "--tune=model=local,sparse"])
  said = capsys.readouterr()
  assert said.err.count("No archive of Text.") == 2
  assert "configs/lra/listops.py:size=tiny: model=" in said.out


def test_sweep_dry_run_prepares_nothing(runs, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(Sweep, "describe_task", lambda *_: pytest.fail("opened"))
  sweep.main(["--config", SPEC, f"--workdir={tmp_path}", "--dry_run"])
  assert f"--config {SPEC}" in capsys.readouterr().out
  assert not runs.commands and not list(tmp_path.iterdir())


def test_sweep_fails_only_the_run_whose_results_changed(
  runs, tmp_path, monkeypatch, capsys
):
  trained = Sweep.train

  def train(self, cell, seed):
    status = trained(self, cell, seed)
    if "local" in cell.spec:
      (self.folder(cell, seed) / "results.json").write_text("{")
    return status

  monkeypatch.setattr(Sweep, "train", train)
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  with pytest.raises(SystemExit, match="model=local.seed_0.*results.json"):
    sweep.main([*argv, "--grid=model=local,sparse"])
  assert "| 50.00 | 0 |" in capsys.readouterr().out


def test_find_ends_returns_the_extreme_values_tried():
  assert find_ends(("2e-3", "5e-4", "1e-3")) == ("5e-4", "2e-3")
  assert find_ends(("local", "1")) == find_ends(("1e-3",)) == ()


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--grid=model"], "'model'.*KEY=VALUE"),
    (["--grid=model=local,"], "'model=local,'.*KEY=VALUE"),
    (["--grid=model=local,local"], "'model=local,local'"),
    (["--grid=model=local", "--tune=model=sparse"], "model.*twice"),
    (["--grid=size=paper"], "size.*size=tiny.*grid"),
    (["--config", f"{SPEC},size=paper"], "size.*size=tiny,size=paper"),
    (["--config", f"{SPEC},seed=1"], "seed=1.*--seeds"),
    (["--config", SPEC], r"size=tiny and .*size=tiny\b"),
    (
      ["--grid=model=local,sparse", "--config.model.name=local"],
      "model=local and .*model=sparse",
    ),
    (["--seeds=0,0"], "--seeds=0,0"),
    (["--seeds=0,-1"], "--seeds=0,-1"),
    (["--grid=seed=1"], "seed .*--seeds"),
    (["--config.seed=1"], "seed.*--seeds"),
    (["--seeds=a"], "--seeds=a"),
    (["--grid=modle=local"], "'modle'.*'model'"),
    (["--grid=protocol=local"], "protocol.*'local'"),
    (["--config.totl_steps=1"], "'totl_steps'.*'total_steps'"),
    (["--config.total_steps=x"], "total_steps"),
    (["--total_steps=1"], "'--total_steps=1'"),
    (["--grid=total_stepz=5"], "'total_stepz'"),
    (["--grid=task.max_lenn=5"], "max_lenn"),
    (["--grid=batch_size=0,1"], "batch_size=0"),
    (
      ["--grid=batch_size=2,1", "--config.batch_size=2"],
      "--config.batch_size=2.*axis",
    ),
    (["--set=model=local"], "model=local: .*WHERE:FIELD=VALUE"),
    (["--set=size=tiny:"], "size=tiny:: .*WHERE:FIELD=VALUE"),
    (["--set=size=tiny:model=local"], "--set size=tiny:model=local"),
    (["--set=size=tiny:seed=1"], "--set size=tiny:seed=1"),
    (["--set=size=paper:batch_size=1"], "size=paper.*listops,size="),
  ],
)
def test_sweep_refuses_wrong_arguments_before_running(
  argv, message, runs, tmp_path
):
  with pytest.raises(SystemExit, match=message):
    sweep.main(["--config", SPEC, f"--workdir={tmp_path}", *argv])
  assert not runs.commands


def test_sweep_prints_one_line_at_ctrl_c(runs, tmp_path, monkeypatch, capsys):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(Sweep, "describe_task", interrupted)
  monkeypatch.setattr(os, "_exit", sys.exit)
  with pytest.raises(SystemExit, match="^130$"):
    sweep.main(["--config", SPEC, f"--workdir={tmp_path}"])
  said = capsys.readouterr().err.strip()
  assert said.startswith("Interrupted")
  assert "\n" not in said


def test_sweep_dry_run_prints_runs_without_results(runs, tmp_path, capsys):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=0,1"]
  sweep.main([*argv, "--dry_run", "--grid=model=local,sparse"])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 4
  assert lines[0].endswith("model=local/seed_0 --config.seed=0")
  assert not runs.commands


def test_sweep_load_config_takes_sizes_of_pretrained_weights(tmp_path):
  vit = Path(__file__).parents[1] / "models" / "pretrained" / "vit"
  cell = Cell("vision/imagenet")
  for folder, width in ((vit, 12), (tmp_path / "later", 192)):
    planned = Sweep(tmp_path, [f"--config.pretrained={folder}"])
    assert planned.load_config(cell, 0).model.d_model == width
