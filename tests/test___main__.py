"""The package as a command."""

import runpy

import pytest


def run(monkeypatch, *argv):
  monkeypatch.setattr("sys.argv", ["jaxformers", *argv])
  with pytest.raises(SystemExit) as exit_info:
    runpy.run_module("jaxformers", run_name="__main__")
  return exit_info.value.code


def test_flags_alone_train(monkeypatch, capsys):
  assert run(monkeypatch) == 2
  assert "--config and --workdir are needed" in capsys.readouterr().err


def test_a_name_runs_its_command(monkeypatch, capsys):
  assert run(monkeypatch, "advise", "--help") == 0
  assert "python -m jaxformers advise" in capsys.readouterr().out


def test_an_unknown_name_lists_the_commands(monkeypatch):
  message = run(monkeypatch, "lipshitz")
  assert "Did you mean 'lipschitz'?" in message
  assert "prepare" in message
