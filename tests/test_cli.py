"""Subcommands, their parser, and how they end."""

import importlib

import pytest

from jaxformers import cli
from jaxformers.errors import UserError


@pytest.mark.parametrize("name", sorted(cli.SUBCOMMANDS))
def test_every_subcommand_has_a_main_with_help(name, capsys):
  module = importlib.import_module(cli.SUBCOMMANDS[name])
  with pytest.raises(SystemExit) as stopped:
    module.main(["--help"])
  assert stopped.value.code == 0
  assert f"python -m jaxformers {name}" in capsys.readouterr().out


def test_a_command_takes_its_arguments_by_keyword():
  seen = []

  @cli.command(cli.argument("name"), cli.argument("--count", type=int))
  def main(name: str, count: int) -> None:
    seen.append((name, count))

  main(["a", "--count", "2"])
  assert seen == [("a", 2)]


@pytest.mark.parametrize(
  "error", [UserError("choose another"), OSError("no such file")]
)
def test_a_mistake_ends_in_one_line(error):
  @cli.command()
  def main() -> None:
    raise error

  with pytest.raises(SystemExit) as stopped:
    main([])
  assert stopped.value.code == f"error: {error}"


def test_an_internal_error_keeps_its_traceback():
  @cli.command()
  def main() -> None:
    raise ValueError("a mistake of ours")

  with pytest.raises(ValueError, match="ours"):
    main([])
