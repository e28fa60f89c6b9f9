"""Arguments that the launchers share; `test_runs` has them in use."""

import argparse

import pytest

from jaxformers.sweep import arguments
from jaxformers.sweep.runs import Sweep


def test_report_names_missing_data_and_exits_with_status_1(tmp_path, capsys):
  args = argparse.Namespace(workdir=tmp_path, slurm=None)
  sweep = arguments.make_sweep(args, ["--config.total_steps=1"])
  assert type(sweep) is Sweep and sweep.overrides == ["--config.total_steps=1"]
  arguments.print_outcome(sweep, strict=True)
  sweep.missing = {"a.py": "No archive."}
  arguments.print_outcome(sweep, strict=False)
  assert "a.py: No archive." in capsys.readouterr().err
  with pytest.raises(SystemExit) as stopped:
    arguments.print_outcome(sweep, strict=True)
  assert stopped.value.code == 1
  sweep.failed = {"runs/a/seed_0": 3}
  other = Sweep(tmp_path, [])
  other.failed = {"runs/b/seed_0": 1}
  message = "exit status:\n  runs/a/seed_0: 3\n  runs/b/seed_0: 1"
  with pytest.raises(SystemExit, match=message):
    arguments.print_outcome(sweep, other, strict=False)


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("--config.batch_size=3", "config.batch_size=3: batch_size is an axis"),
    ("--noconfig.batch_size", "noconfig.batch_size: batch_size is an axis"),
    ("-config.seed=1", "config.seed=1: give --seeds"),
  ],
)
def test_check_overrides_refuses_an_axis_of_the_sweep(override, message):
  with pytest.raises(ValueError, match=message):
    arguments.check_overrides([override], [("batch_size", ("1", "2"))])
  arguments.check_overrides(["--config.seed_of=1"], [])
