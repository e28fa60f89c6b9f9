"""Runs a command, `python -m jaxformers NAME ...`, or lists them all."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

from jaxformers.foundations import interrupts
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.version import __version__

# Commands as their overview groups them.
GROUPS = {
  "Train": ("train", "prepare", "models", "configs", "tasks", "zoo"),
  "Compare runs": ("results", "report", "published", "price"),
  "Look into a model": (
    "lipschitz",
    "inverse",
    "certified",
    "smoothness",
    "isometry",
  ),
  "Evaluate and take away": (
    "perplexity",
    "segmentation",
    "robustness",
    "export",
  ),
  "Depth and width": ("advise", "bounds", "rank", "depth"),
}
# Modules of commands, by name. Each has a `main` that takes the arguments after
# the name; that of training reads the flags of the process.
COMMANDS = {
  name: f"jaxformers.commands.{name}"
  for names in GROUPS.values()
  for name in names
} | {"train": "jaxformers.main"}

USAGE = """usage: jaxformers COMMAND ...

  jaxformers train lra/listops:size=tiny --workdir runs/listops
  jaxformers COMMAND --help
  jaxformers --version
"""


def overview() -> str:
  """Returns a line for each command: the first of its module's docstring.

  No command is imported for it.
  """
  lines = [USAGE]
  width = max(map(len, COMMANDS))
  for title, names in GROUPS.items():
    lines.append(f"{title}:")
    for name in names:
      spec = importlib.util.find_spec(COMMANDS[name])
      assert spec is not None and spec.origin  # The package has its source.
      source = Path(spec.origin).read_text(encoding="utf-8")
      document = ast.get_docstring(ast.parse(source)) or ""
      lines.append(f"  {name:<{width}}  {document.splitlines()[0]}")
  return "\n".join(lines)


def console() -> None:
  """Runs a command. Flags alone train; no argument lists the commands."""
  try:
    _run()
  except KeyboardInterrupt:  # Before the command has begun.
    interrupts.leave()


def _run() -> None:
  name = sys.argv[1] if len(sys.argv) > 1 else ""
  if name in ("", "help", "--help", "-h"):
    with interrupts.closed_pipe():
      print(overview())
    return
  if name == "--version":
    print(__version__)
    return
  if name == "train":
    del sys.argv[1]  # Flags of absl follow the name of the program.
  if name == "train" or name.startswith("-"):
    with interrupts.importing():
      from jaxformers import main  # Defines flags.

    main.console()
    return
  try:
    choose("command", name, COMMANDS)
  except UserError as error:
    sys.exit(f"error: {error} `jaxformers --help` describes them.")
  del sys.argv[1]
  with interrupts.importing():
    module = importlib.import_module(COMMANDS[name])
  module.main()
