"""Arguments and parsers that commands share."""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxformers.foundations import interrupts, requirements, user_code
from jaxformers.foundations.errors import UserError


class Command(Protocol):
  """The `main` of a command."""

  def __call__(self, argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` of None stands for that of the process."""


class Argument(NamedTuple):
  """Arguments of `argparse.ArgumentParser.add_argument`."""

  flags: tuple[str, ...]
  options: dict[str, Any]


def argument(*flags: str, **options: Any) -> Argument:
  """Declares an argument of a command, as `add_argument` takes it.

  A default gives the type, and is named in the help unless it is 0 or "".
  """
  if "default" in options:
    options.setdefault("type", type(options["default"]))
  if options.get("default"):
    text = options.get("help", "")
    options["help"] = f"{text} (default: %(default)s)".strip()
  return Argument(flags, options)


def option(name: str, default: Any, text: str) -> Argument:
  """Declares --NAME with a default, which gives its type, and its help."""
  return argument(f"--{name}", default=default, help=text)


def switch(flag: str, **options: Any) -> Argument:
  """Declares a flag without a value, which is False unless it is given."""
  return Argument((flag,), {"action": "store_true", **options})


VALUE = re.compile(r"(?!-)|-\.?\d")  # A word that is no flag: -1 is a number.

WORKDIR = argument("workdir", metavar="WORKDIR", help="folder of a run")
WORKDIRS = argument(
  "workdirs",
  nargs="+",
  type=Path,
  metavar="WORKDIR",
  help="folder of a run, or a folder with runs below it",
)
TRUST = switch("--trust", help="import modules of code that the folders name")
JSON = switch("--json", dest="as_json", help="print JSON")


def show(content: Any, lines: Iterable[str], as_json: bool) -> None:
  """Prints the result of a command as JSON, or else the lines about it."""
  print(json.dumps(content, indent=2) if as_json else "\n".join(lines))


def numbers(flag: str, text: str, kind: type[int | float] = int) -> list[Any]:
  """Returns the numbers of a comma-separated option; "" gives [].

  Args:
    flag: name of the option, for the error message.
    text: value of the option, such as "1,2".
    kind: int or float.

  Raises:
    UserError: for an item that is not a number of that kind.
  """
  try:
    return [kind(item) for item in text.split(",")] if text else []
  except ValueError:
    noun = "integers" if kind is int else "numbers"
    raise UserError(f"--{flag}={text}: give {noun}, such as 1,2.") from None


def names(text: str) -> list[str]:
  """Returns the names of a comma-separated option; "" gives []."""
  return [name for name in text.split(",") if name]


def is_override(argument: str) -> bool:
  """Returns True for an argument that sets a field of a config."""
  name = argument.removeprefix("-").removeprefix("-")
  return name != argument and name.startswith(("config.", "noconfig."))


def split_overrides(
  arguments: Sequence[str],
) -> tuple[list[str], list[str]]:
  """Returns the arguments that set fields of a config, and the others.

  "--config.seed 1" becomes "--config.seed=1"; a field that is followed by
  another flag, such as "--config.wandb --eval_only", stands for True.
  """
  overrides: list[str] = []
  rest: list[str] = []
  words = collections.deque(arguments)
  while words:
    word = words.popleft()
    if not is_override(word):
      rest.append(word)
      continue
    is_whole = "=" in word or word.lstrip("-").startswith("no")
    if not is_whole and words and VALUE.match(words[0]):
      word = f"{word}={words.popleft()}"
    overrides.append(word)
  return overrides, rest


def parser(module: str, *arguments: Argument) -> argparse.ArgumentParser:
  """Returns the parser of a command; its help is the module's docstring.

  Args:
    module: name of the module, as in `__name__`.
    *arguments: arguments of the command.
  """
  # `python -m` names the module "__main__"; its spec has the real path.
  spec = sys.modules[module].__spec__
  path = spec.name.removesuffix(".__main__") if spec else ""
  # Usage shows the command as a user types it.
  path = path.replace("jaxformers.commands.", "jaxformers ")
  program = f"python -m {path}" if spec else None
  # Keep the line breaks of the docstring and its examples.
  command_parser = argparse.ArgumentParser(
    prog=program,
    description=sys.modules[module].__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  for flags, options in arguments:
    command_parser.add_argument(*flags, **options)
  return command_parser


def command(
  *arguments: Argument,
  make_parser: Callable[[], argparse.ArgumentParser] | None = None,
  takes_overrides: bool = False,
  on_interrupt: str = "",
) -> Callable[[Callable[..., None]], Command]:
  """Makes a command of a function: `main(argv)` parses and calls it.

  A `UserError` or an error of the file system ends the command with one line
  and status 1. A command that reads the folders of runs also takes --trust.

  Args:
    *arguments: from `argument`; the function takes them by keyword.
    make_parser: returns the parser instead, for commands with subcommands.
    takes_overrides: True for a command that takes fields of a config, such as
      --config.model.d_model=64; the function takes the list `overrides`.
    on_interrupt: sentence that says what the same command does when it is run
      again after Ctrl-C; "" if it starts again from nothing.
  """

  def decorate(function: Callable[..., None]) -> Command:
    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> None:
      # Build the parser at the call, so that an import does no work.
      reads_runs = any(a.options.get("metavar") == "WORKDIR" for a in arguments)
      offered = (*arguments, TRUST) if reads_runs else arguments
      build = make_parser or (lambda: parser(function.__module__, *offered))
      flags = sys.argv[1:] if argv is None else list(argv)
      overrides: list[str] = []
      rest = flags
      if takes_overrides:
        overrides, rest = split_overrides(flags)
      options = vars(build().parse_args(rest))
      if takes_overrides:
        options["overrides"] = overrides
      trust = reads_runs and options.pop("trust")
      try:
        if "jax" in sys.modules:  # A command that computes.
          requirements.require_device()
        with interrupts.closed_pipe(), user_code.trusting(trust):
          function(**options)
      except KeyboardInterrupt:
        if argv is not None and not on_interrupt:
          raise  # Another program has called it.
        interrupts.leave(on_interrupt)
      # Mistakes of the user end in one line; bugs keep their traceback.
      except (UserError, OSError) as error:
        sys.exit(f"error: {error}")

    return main

  return decorate
