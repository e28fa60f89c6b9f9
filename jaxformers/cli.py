"""Command lines: the subcommands of `jaxformers`, and the parser they share."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxformers import interrupts
from jaxformers.errors import UserError

# Each module has a `main` that takes the arguments after the name.
SUBCOMMANDS = {
  "advise": "jaxformers.theory.advise",
  "bounds": "jaxformers.theory.bounds",
  "depth": "jaxformers.analysis.tables.depth",
  "export": "jaxformers.analysis.evaluation.export",
  "inverse": "jaxformers.analysis.certificates.inverse",
  "lipschitz": "jaxformers.analysis.certificates.lipschitz",
  "models": "jaxformers.costs",
  "perplexity": "jaxformers.analysis.evaluation.perplexity",
  "prepare": "jaxformers.prepare",
  "published": "jaxformers.analysis.tables.published",
  "rank": "jaxformers.theory.rank",
  "report": "jaxformers.analysis.page.report",
  "results": "jaxformers.analysis.tables.results",
  "robustness": "jaxformers.analysis.evaluation.robustness",
  "segmentation": "jaxformers.analysis.evaluation.segmentation",
  "smoothness": "jaxformers.analysis.tokens.smoothness",
}


class Argument(NamedTuple):
  """Arguments of `argparse.ArgumentParser.add_argument`."""

  flags: tuple[str, ...]
  options: dict[str, Any]


def argument(*flags: str, **options: Any) -> Argument:
  """Declares an argument of a command, as `add_argument` takes it."""
  return Argument(flags, options)


def parser(module: str, *arguments: Argument) -> argparse.ArgumentParser:
  """Returns the parser of a command; its help is the module's docstring.

  Args:
    module: name of the module, as in `__name__`.
    *arguments: of the command.
  """
  names = {path: name for name, path in SUBCOMMANDS.items()}
  spec = sys.modules[module].__spec__
  path = spec.name if spec else module
  built = argparse.ArgumentParser(
    prog=f"python -m {f'jaxformers {names[path]}' if path in names else path}",
    description=sys.modules[module].__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  for flags, options in arguments:
    built.add_argument(*flags, **options)
  return built


def command(
  *arguments: Argument,
  make_parser: Callable[[], argparse.ArgumentParser] | None = None,
  on_interrupt: str = "",
) -> Callable[[Callable[..., None]], Callable[[Sequence[str] | None], None]]:
  """Makes a command of a function: `main(argv)` parses and calls it.

  A `UserError` or an error of the file system ends the command with one line
  and status 1.

  Args:
    *arguments: from `argument`; the function takes them by keyword.
    make_parser: returns the parser instead, for commands with subcommands.
    on_interrupt: what the same command does when it is run again after Ctrl-C,
      as a sentence; "" if there is nothing to say.
  """

  def decorate(
    function: Callable[..., None],
  ) -> Callable[[Sequence[str] | None], None]:
    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> None:
      build = make_parser or functools.partial(
        parser, function.__module__, *arguments
      )
      options = vars(build().parse_args(argv))
      try:
        function(**options)
      except KeyboardInterrupt:
        if not on_interrupt:
          raise
        interrupts.leave(on_interrupt)
      except (UserError, OSError) as error:
        sys.exit(f"error: {error}")

    return main

  return decorate
