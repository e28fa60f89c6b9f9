"""Runs of a grid as jobs, of programs that stand for Slurm's."""

import json

import pytest

from jaxformers.sweep.slurm import SlurmSweep
from launch import sweep

pytestmark = pytest.mark.slow

SPEC = "configs/lra/listops.py:size=tiny"


def test_sweep_slurm_runs_a_grid_as_an_array(slurm, tmp_path, capsys):
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}", "--seeds=0,1"]
  argv += ["--slurm", "partition=gpu,time=60"]
  sweep.main([*argv, "--grid=model=transject,local"])
  text = slurm.read_text()
  assert "#SBATCH --array=0-3%4" in text
  assert "#SBATCH --partition=gpu" in text
  assert "#SBATCH --time=60" in text
  said = capsys.readouterr().out
  assert "4 jobs submitted, 0 " in said
  assert said.count("| 50.00 +- 0.00 | 0 1 |") == 2
  # What has results is not submitted again, and what fails is named.
  with pytest.raises(SystemExit, match=r"model=sparse.seed_0: 1\n.*seed_1: 1"):
    sweep.main([*argv, "--grid=model=transject,sparse"])
  assert "#SBATCH --array=0-1%2" in slurm.read_text()


def test_sweep_slurm_waits_for_a_queued_job(slurm, tmp_path, monkeypatch):
  """By the next sweep, too."""
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}", "--slurm"]
  with monkeypatch.context() as patch:
    patch.setattr(SlurmSweep, "train", lambda *_: exit(130))
    with pytest.raises(SystemExit, match="130"):
      sweep.main(argv)
  sweep.main(argv)
  assert slurm.read_text().count("#!/bin/bash") == 1


def test_sweep_slurm_resubmits_a_lost_job(slurm, tmp_path, monkeypatch):
  folder = tmp_path / "runs"
  argv = ["--config", SPEC, f"--workdir={folder}", "--slurm"]
  (folder / "slurm").mkdir(parents=True)
  run = str(folder / "lra_listops" / "size=tiny" / "seed_0")
  (folder / "slurm" / "jobs.json").write_text(json.dumps({run: "3"}))
  monkeypatch.setenv("GONE", "yes")
  sweep.main(argv)
  assert slurm.read_text().count("#!/bin/bash") == 1


@pytest.mark.parametrize(
  ("said", "count"),
  [
    ("slurm_load_jobs error: Invalid job id specified", 1),
    # A job that may still run is not submitted again.
    ("slurm_load_jobs error: Unable to contact slurm controller", 0),
  ],
)
def test_sweep_slurm_resubmits_no_job_that_may_run(
  slurm, tmp_path, monkeypatch, said, count
):
  folder = tmp_path / "runs"
  (folder / "slurm").mkdir(parents=True)
  run = str(folder / "lra_listops" / "size=tiny" / "seed_0")
  (folder / "slurm" / "jobs.json").write_text(json.dumps({run: "3"}))
  monkeypatch.setenv("SAYS", said)
  monkeypatch.setattr(SlurmSweep, "train", lambda *_: exit(130))
  with pytest.raises(SystemExit, match="130"):
    sweep.main(["--config", SPEC, f"--workdir={folder}", "--slurm"])
  text = slurm.read_text() if slurm.exists() else ""
  assert text.count("#!/bin/bash") == count
  assert text.count("#SBATCH --requeue") == count


def test_sweep_slurm_names_why_a_job_is_refused(slurm, tmp_path):
  program = tmp_path / "bin" / "sbatch"
  program.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}", "--slurm"]
  with pytest.raises(
    SystemExit, match="(?s)error: --slurm: .*invalid partition"
  ):
    sweep.main(argv)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("time", "'time'.*KEY=VALUE"),
    ("partition=a\n#SBATCH --wrap=x", "--slurm partition=.*wrap"),
    ("tiem=1", "--slurm.*'tiem'"),
    ("time=12:00:00", "time=12:00:00"),
    ("nodes=2-4", "nodes=2-4"),
    ("ntasks_per_node=8", "--slurm ntasks_per_node=8"),
  ],
)
def test_sweep_slurm_refuses_wrong_parameters(slurm, tmp_path, text, message):
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}"]
  with pytest.raises(SystemExit, match=message):
    sweep.main([*argv, f"--slurm={text}"])


def test_sweep_slurm_is_refused_without_srun(runs, tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", "")
  with pytest.raises(SystemExit, match="--slurm.*srun"):
    sweep.main(["--config", SPEC, f"--workdir={tmp_path}", "--slurm"])


def test_sweep_slurm_dry_run_prints_the_script(
  runs, tmp_path, monkeypatch, capsys
):
  monkeypatch.setenv("PATH", "")
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}", "--dry_run"]
  sweep.main([*argv, "--seeds=0,1,2", "--slurm=partition=gpu,time=60"])
  printed = capsys.readouterr().out
  assert printed.count("-m jaxformers.main --config") == 3
  for line in ("--array=0-2%3", "--partition=gpu", "--time=60"):
    assert f"#SBATCH {line}\n" in printed
  assert "srun --unbuffered" in printed
  assert not [*tmp_path.iterdir()]
  # What has results is not submitted.
  folder = tmp_path / "runs/lra_listops/size=tiny/seed_0"
  folder.mkdir(parents=True)
  (folder / "results.json").write_text("{}")
  sweep.main([*argv, "--seeds=0,1", "--slurm"])
  assert "--array" not in capsys.readouterr().out
  with pytest.raises(SystemExit, match="--slurm.*'tiem'"):
    sweep.main([*argv, "--slurm=tiem=1"])
