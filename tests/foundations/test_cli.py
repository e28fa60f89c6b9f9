"""Subcommands, their parser, and how they end."""

import sys

import pytest

from jaxformers.commands import console
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from tests.assertions import assert_all


def test_every_subcommand_has_help(capsys):
  def check(name):
    # Training reads the flags of the process.
    argv = ["jaxformers", name, "--help"]
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sys, "argv", argv)
      with pytest.raises(SystemExit) as stopped:
        console.console()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"jaxformers {name} " in printed

  assert_all(check, zip(console.COMMANDS), least=20)


def test_command_passes_arguments_by_keyword():
  seen = []

  @cli.command(cli.argument("name"), cli.argument("--count", type=int))
  def main(name: str, count: int) -> None:
    seen.append((name, count))

  main(["a", "--count", "2"])
  assert seen == [("a", 2)]


@pytest.mark.parametrize(
  "error", [UserError("choose another"), OSError("no such file")]
)
def test_command_prints_user_and_os_errors_on_one_line(error):
  @cli.command()
  def main() -> None:
    raise error

  with pytest.raises(SystemExit) as stopped:
    main([])
  assert stopped.value.code == f"error: {error}"


def test_command_raises_internal_errors():
  @cli.command()
  def main() -> None:
    raise ValueError("a mistake of ours")

  with pytest.raises(ValueError, match="mistake of ours"):
    main([])


def test_command_help_names_nonempty_defaults(capsys):
  @cli.command(
    cli.argument("--steps", type=int, default=7, help="steps of Adam"),
    cli.argument("--out", default="", help="path"),
  )
  def main(steps: int, out: str) -> None:
    raise AssertionError

  with pytest.raises(SystemExit):
    main(["--help"])
  shown = capsys.readouterr().out
  assert "steps of Adam (default: 7)" in shown
  assert shown.count("default") == 1


def test_numbers_parses_a_list_or_refuses_it():
  assert cli.numbers("sizes", "") == []
  assert cli.numbers("sizes", "1,2") == [1, 2]
  assert cli.numbers("scales", "0.5,1", float) == [0.5, 1.0]
  with pytest.raises(UserError, match="--sizes=1,a"):
    cli.numbers("sizes", "1,a")
  assert cli.names("a,b,") == ["a", "b"]


def test_split_overrides_separates_config_fields_from_flags():
  words = "--a --config.seed 1 -config.x=2 --noconfig.y --config=z"
  fields = ["--config.seed=1", "-config.x=2", "--noconfig.y"]
  split = cli.split_overrides(words.split(" "))
  assert split == (fields, ["--a", "--config=z"])
  words = ["--config.a", "-1", "--config.b", "-.5", "--config.c", "-x"]
  fields = ["--config.a=-1", "--config.b=-.5", "--config.c"]
  assert cli.split_overrides(words) == (fields, ["-x"])
  # A flag without a value stands for True.
  flags = ["--config.wandb", "--eval_only"]
  assert cli.split_overrides(flags) == (flags[:1], flags[1:])
