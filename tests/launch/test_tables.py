"""A published table by one command: runs, estimates, and what is missing."""

import pytest

from jaxformers.foundations.errors import UserError
from jaxformers.sweep import estimates
from jaxformers.sweep.runs import Sweep
from jaxformers.training import topologies
from launch import tables
from tests.sweep.conftest import Runs, describe_task

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


@pytest.fixture
def runs(monkeypatch):
  fake = Runs()
  monkeypatch.setattr("jaxformers.sweep.commands.call", fake)
  monkeypatch.setattr(Sweep, "describe_task", describe_task)
  return fake


ARGV = ["2", "--size=tiny", "--models=transject,performer", "--seeds=0,1"]


def test_tables_command_runs_a_plan_and_prints_its_table(
  runs, tmp_path, monkeypatch, capsys
):
  def describe(self, config):
    if config.task.name == "retrieval":
      raise UserError("No pairs.")
    return describe_task(self, config)

  monkeypatch.setattr(Sweep, "describe_task", describe)
  argv = [*ARGV, f"--workdir={tmp_path}"]
  tables.main(argv)
  said = capsys.readouterr()
  # Four of five tasks, two models, two seeds.
  assert len(runs.commands) == 4 * 2 * 2
  assert "TransJect, table 2: Long Range Arena" in said.out
  assert "ListOps, paper" in said.out
  assert said.err.count("retrieval.py:protocol=paper,size=tiny") == 2
  assert "No pairs." in said.err
  # Nothing is run again, and missing data are an error where asked.
  with pytest.raises(SystemExit) as stopped:
    tables.main([*argv, "--strict"])
  assert stopped.value.code == 1
  assert len(runs.commands) == 16


def test_tables_command_dry_run_prints_commands_and_costs(
  runs, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(Sweep, "describe_task", lambda *_: pytest.fail("opened"))
  one = estimates.Estimate(1, 1.0, 1.0)
  monkeypatch.setattr(estimates, "measure_rate", lambda: 1e12)
  monkeypatch.setattr(
    estimates, "estimate_all", lambda configs, *_: [one] * len(configs)
  )
  monkeypatch.setattr(estimates, "compiled_hours", lambda *_: 1.5)
  monkeypatch.setattr(topologies, "describe_devices", lambda _: [])
  argv = [*ARGV, f"--workdir={tmp_path}", "--dry_run", "--device=h100:2"]
  tables.main(argv)
  said = capsys.readouterr().out
  assert said.count("-m jaxformers.main --config configs/lra/") == 20
  assert (
    "| configs/lra/text.py:protocol=paper,size=tiny,model=transject |" in said
  )
  assert "| not in --archives |" in said
  assert "20 runs with 2 seeds: about 20 hours" in said
  assert "| run | steps | hours | hours, h100:2 | GB | data |" in said
  assert "On h100:2 about 30.0 hours, by the compiled steps" in said
  assert not runs.commands and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["3x"], "Unknown table '3x'"),
    (["2", "--models=transjec"], "Did you mean 'transject'"),
    (["2", "--config.seed=1"], "give --seeds"),
    (["2", "--device=h100"], "add --dry_run"),
    (["2", "--device=h101", "--dry_run"], "Unknown device 'h101'"),
    (["2", "--size=huge"], "Unknown size 'huge'"),
    (["2", "--set=model=local:batch_size=2"], "no run .* model=local"),
  ],
)
def test_tables_command_refuses_wrong_arguments(argv, message, runs, tmp_path):
  with pytest.raises(SystemExit, match=message):
    tables.main([*argv, f"--workdir={tmp_path}"])
  assert not runs.commands


def test_tables_command_needs_a_workdir_but_for_table_3(capsys):
  tables.main(["3", "--dry_run"])
  assert "parameters and speed" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="give --workdir"):
    tables.main(ARGV)
