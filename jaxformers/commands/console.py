"""Runs a command by `jaxformers NAME ...`, or lists all commands."""

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

# Commands by the titles of their groups in the overview.
GROUPS = {
  "Train": ("train", "prepare", "compile", "models", "configs", "tasks", "zoo"),
  "Compare runs": ("results", "report", "published", "price"),
  "Look into a model": (
    "lipschitz",
    "inverse",
    "collisions",
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
  "Depth and width": ("advise", "bounds", "rank", "depth", "depth_use"),
}
# Modules of commands, by name. Each module has a `main`, which takes the
# arguments after the name. The training command reads the process's arguments.
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
  """Returns the list of commands, with the first line of each docstring.

  The docstrings are read from the source files without importing a command.
  """
  lines = [USAGE]
  width = max(map(len, COMMANDS))
  for title, names in GROUPS.items():
    lines.append(f"{title}:")
    # Read the docstring from the source file of the module.
    for name in names:
      spec = importlib.util.find_spec(COMMANDS[name])
      assert spec is not None and spec.origin  # The package has its source.
      source = Path(spec.origin).read_text(encoding="utf-8")
      document = ast.get_docstring(ast.parse(source)) or ""
      lines.append(f"  {name:<{width}}  {document.splitlines()[0]}")
  return "\n".join(lines)


def console() -> None:
  """Runs the command that the arguments of the process name.

  Arguments that begin with a flag train a model. Without arguments, the
  commands are listed.
  """
  try:
    _run()
  except KeyboardInterrupt:  # Ctrl-C before the command starts.
    interrupts.leave()


def _run() -> None:
  name = sys.argv[1] if len(sys.argv) > 1 else ""
  # List the commands, or print the version.
  if name in ("", "help", "--help", "-h"):
    with interrupts.closed_pipe():
      print(overview())
    return
  if name == "--version":
    print(__version__)
    return
  # Train. absl expects its flags directly after the name of the program.
  if name == "train":
    del sys.argv[1]
  if name == "train" or name.startswith("-"):
    with interrupts.importing():
      from jaxformers import main  # Defines flags.

    main.console()
    return
  # Run one of the other commands.
  try:
    choose("command", name, COMMANDS)
  except UserError as error:
    sys.exit(f"error: {error} `jaxformers --help` describes them.")
  del sys.argv[1]
  with interrupts.importing():
    module = importlib.import_module(COMMANDS[name])
  module.main()
