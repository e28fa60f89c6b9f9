"""The package as a command."""

import runpy

import pytest

import jaxformers
from jaxformers.commands import console


def run(monkeypatch, *argv):
  monkeypatch.setattr("sys.argv", ["jaxformers", *argv])
  with pytest.raises(SystemExit) as exit_info:
    runpy.run_module("jaxformers", run_name="__main__")
  return exit_info.value.code


@pytest.mark.parametrize("argv", [["train"], ["--workdir=here"]])
def test_train_subcommand_without_config_is_refused(monkeypatch, capsys, argv):
  assert run(monkeypatch, *argv) == 2
  assert "A config is needed" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_overview_of_commands_fits_a_screen(monkeypatch, capsys, argv):
  monkeypatch.setattr("sys.argv", ["jaxformers", *argv])
  runpy.run_module("jaxformers", run_name="__main__")
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) <= 40
  assert max(map(len, lines)) <= 100
  listed = {line.split()[0] for line in lines if line.startswith("  ")}
  assert listed >= console.COMMANDS.keys()


def test_version_option_prints_the_version(monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["jaxformers", "--version"])
  runpy.run_module("jaxformers", run_name="__main__")
  assert capsys.readouterr().out == f"{jaxformers.__version__}\n"


def test_subcommand_name_runs_its_command(monkeypatch, capsys):
  assert run(monkeypatch, "advise", "--help") == 0
  assert "usage: jaxformers advise" in capsys.readouterr().out


def test_unknown_subcommand_lists_the_commands(monkeypatch):
  message = run(monkeypatch, "lipshitz")
  assert "'lipschitz'" in message
  assert "prepare" in message
