"""`python -m jaxformers NAME ...` runs a subcommand; without NAME it trains."""

from __future__ import annotations

import importlib
import sys

from jaxformers.cli import SUBCOMMANDS
from jaxformers.errors import UserError
from jaxformers.registry import choose


def console() -> None:
  """Runs a subcommand, or training if the first argument is a flag."""
  name = sys.argv[1] if len(sys.argv) > 1 else ""
  if not name or name.startswith("-"):
    from jaxformers import main  # Defines flags.

    main.console()
    return
  try:
    choose("command", name, SUBCOMMANDS)
  except UserError as error:
    sys.exit(f"error: {error} Training takes flags alone: --help lists them.")
  importlib.import_module(SUBCOMMANDS[name]).main(sys.argv[2:])


if __name__ == "__main__":
  console()
