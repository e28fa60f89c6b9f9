"""The package as a command."""

import runpy

import pytest


def test_the_package_runs_as_main_does(monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["jaxformers"])
  with pytest.raises(SystemExit) as exit_info:
    runpy.run_module("jaxformers", run_name="__main__")
  assert exit_info.value.code == 2
  assert "--config and --workdir are needed" in capsys.readouterr().err
