"""The overview of the commands."""

import importlib
from pathlib import Path

from jaxformers.commands import console


def test_overview_has_the_docstring_line_of_every_command():
  lines = console.overview().splitlines()
  for name, module in console.COMMANDS.items():
    document = importlib.import_module(module).__doc__
    (line,) = (line for line in lines if line.split()[:1] == [name])
    assert line.endswith(document.splitlines()[0])


def test_every_command_is_listed():
  folder = Path(console.__file__).parent
  commands = {
    path.stem
    for path in folder.glob("*.py")
    if "@cli.command(" in path.read_text(encoding="utf-8")
  }
  assert commands and commands <= {*console.COMMANDS}
