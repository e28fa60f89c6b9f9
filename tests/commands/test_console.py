"""The overview of the commands."""

import importlib

from jaxformers.commands import cli
from jaxformers.commands import registry as commands


def test_every_command_has_a_line_of_its_module():
  lines = commands.overview().splitlines()
  for name, module in cli.SUBCOMMANDS.items():
    document = importlib.import_module(module).__doc__
    (line,) = (line for line in lines if line.split()[:1] == [name])
    assert line.endswith(document.splitlines()[0])
