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
  """Type of the `main` function of a command."""

  def __call__(self, argv: Sequence[str] | None = None) -> None:
    """Runs the command on `argv`, or on the process's arguments if None."""


class Argument(NamedTuple):
  """Arguments of `argparse.ArgumentParser.add_argument`."""

  flags: tuple[str, ...]
  options: dict[str, Any]


def argument(*flags: str, **options: Any) -> Argument:
  """Declares an argument of a command.

  A default sets the type of the argument. The help shows the default unless it
  is 0 or "".

  Args:
    *flags: flags or name of the argument, as `add_argument` takes them.
    **options: keyword arguments of `add_argument`.
  """
  if "default" in options:
    options.setdefault("type", type(options["default"]))
  if options.get("default"):
    text = options.get("help", "")
    options["help"] = f"{text} (default: %(default)s)".strip()
  return Argument(flags, options)


def option(name: str, default: Any, text: str) -> Argument:
  """Declares the option --NAME; its default sets its type."""
  return argument(f"--{name}", default=default, help=text)


def switch(flag: str, **options: Any) -> Argument:
  """Declares a flag without a value; its default is False."""
  return Argument((flag,), {"action": "store_true", **options})


# Beginning of a word that is a value and not a flag; -1 is a number.
VALUE = re.compile(r"(?!-)|-\.?\d")

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
  """Prints the result of a command as JSON, or as lines of text."""
  print(json.dumps(content, indent=2) if as_json else "\n".join(lines))


def numbers(flag: str, text: str, kind: type[int | float] = int) -> list[Any]:
  """Parses the numbers of a comma-separated option; "" gives [].

  Args:
    flag: name of the option, for the error message.
    text: value of the option, such as "1,2".
    kind: int or float.

  Raises:
    UserError: if an item is not a number of that kind.
  """
  try:
    return [kind(item) for item in text.split(",")] if text else []
  except ValueError:
    noun = "integers" if kind is int else "numbers"
    raise UserError(f"--{flag}={text}: give {noun}, such as 1,2.") from None


def names(text: str) -> list[str]:
  """Parses the names of a comma-separated option; "" gives []."""
  return [name for name in text.split(",") if name]


def is_override(argument: str) -> bool:
  """Returns True for an argument that sets a field of a config."""
  name = argument.removeprefix("-").removeprefix("-")
  return name != argument and name.startswith(("config.", "noconfig."))


def split_overrides(
  arguments: Sequence[str],
) -> tuple[list[str], list[str]]:
  """Separates the arguments that set fields of a config from the others.

  "--config.seed 1" becomes "--config.seed=1". A field that another flag
  follows, as in "--config.wandb --eval_only", is set to True.

  Returns:
    The arguments that set fields, and the other arguments.
  """
  overrides: list[str] = []
  rest: list[str] = []
  words = collections.deque(arguments)
  while words:
    word = words.popleft()
    if not is_override(word):
      rest.append(word)
      continue
    # Join the flag with its value, if the next word is one.
    is_whole = "=" in word or word.lstrip("-").startswith("no")
    if not is_whole and words and VALUE.match(words[0]):
      word = f"{word}={words.popleft()}"
    overrides.append(word)
  return overrides, rest


def parser(module: str, *arguments: Argument) -> argparse.ArgumentParser:
  """Builds the parser of a command. Its help is the module's docstring.

  Args:
    module: name of the module, from `__name__`.
    *arguments: arguments of the command.
  """
  # Under `python -m` the module is "__main__"; its spec has the real name.
  spec = sys.modules[module].__spec__
  path = spec.name.removesuffix(".__main__") if spec else ""
  # Show the command in the usage as a user types it.
  program = f"python -m {path}" if spec else None
  if path.startswith("jaxformers.commands."):
    program = f"jaxformers {path.rpartition('.')[2]}"
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
  """Returns a decorator that turns a function into a command.

  The command `main(argv)` parses the arguments and calls the function. A
  `UserError` or an error of the file system ends the command with one line and
  status 1. A command that reads the folders of runs also accepts --trust.

  Args:
    *arguments: results of `argument`; the function takes their values by
      keyword.
    make_parser: function that builds the parser of a command with subcommands;
      `arguments` are then not used.
    takes_overrides: True for a command that accepts fields of a config, such as
      --config.model.d_model=64. The function takes them as the list
      `overrides`.
    on_interrupt: sentence on what the command does when it is run again after
      Ctrl-C; "" if it starts from the beginning.
  """

  def decorate(function: Callable[..., None]) -> Command:
    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> None:
      # Build the parser when the command is called: an import does no work.
      reads_runs = any(a.options.get("metavar") == "WORKDIR" for a in arguments)
      offered = (*arguments, TRUST) if reads_runs else arguments
      build = make_parser or (lambda: parser(function.__module__, *offered))
      # Parse the arguments, apart from the fields of a config.
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
        if "jax" in sys.modules:  # Only commands that compute import JAX.
          requirements.require_device()
        with interrupts.closed_pipe(), user_code.trusting(trust):
          function(**options)
      except KeyboardInterrupt:
        if argv is not None and not on_interrupt:
          raise  # Another program has called the command.
        interrupts.leave(on_interrupt)
      # Print mistakes of the user in one line; bugs keep their traceback.
      except (UserError, OSError) as error:
        sys.exit(f"error: {error}")

    return main

  return decorate
