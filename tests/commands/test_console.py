"""The overview of the commands."""

import importlib

from jaxformers.commands import console


def test_overview_has_the_docstring_line_of_every_command():
  lines = console.overview().splitlines()
  for name, module in console.COMMANDS.items():
    document = importlib.import_module(module).__doc__
    (line,) = (line for line in lines if line.split()[:1] == [name])
    assert line.endswith(document.splitlines()[0])
