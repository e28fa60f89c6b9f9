"""Lists all tasks with their protocols and a line on each.

jaxformers tasks

The command `prepare` describes the options of a task: `prepare TASK --help`.
"""

from __future__ import annotations

import inspect
import sys

from jaxformers.foundations import cli
from jaxformers.foundations.registry import summarize
from jaxformers.foundations.tables import markdown_table
from jaxformers.tasks import TASKS


def protocols(name: str) -> tuple[str, ...]:
  """Returns the protocols of a task. The default protocol comes first."""
  loader = TASKS[name]
  declared = getattr(sys.modules[loader.__module__], "PROTOCOLS", {})
  # A module of several tasks declares the protocols of each task by name.
  if name in declared:
    return tuple(declared[name])
  # Otherwise the declared protocols, or the default of the loader.
  default = inspect.signature(loader).parameters["protocol"].default
  return tuple(declared) or (default,)


@cli.command()
def main() -> None:
  """Prints a line for each task."""
  rows = [
    (name, ", ".join(protocols(name)), summarize(loader))
    for name, loader in sorted(TASKS.items())
  ]
  print(markdown_table(("task", "protocols", "what it is"), rows))


if __name__ == "__main__":
  main()
