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
  with pytest.raises(SystemExit, match="exit status:\n  runs/a/seed_0: 3"):
    arguments.print_outcome(sweep, strict=False)


def test_check_overrides_refuses_an_axis_of_the_sweep():
  with pytest.raises(ValueError, match="config.batch_size=3.*axis"):
    arguments.check_overrides(
      ["--config.batch_size=3"], [("batch_size", ("1", "2"))]
    )
