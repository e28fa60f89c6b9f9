r"""Tables of docs/performance.md: speed and memory compared with PyTorch.

pip install -e '.[bench]' && python -m benchmarks --out performance.json

The command prints Markdown, and writes JSON with hardware and versions for
`benchmarks.compare`. All calls of a row take turns in every round and use the
same number of threads. Tables show medians over the rounds; a ratio is the
median of the ratios of all rounds. Compilation is not counted. The tables take
about an hour on two cores. `python -m benchmarks.speed` or --tables speed makes
only the tables of that module.
"""

from __future__ import annotations

import importlib

from benchmarks.data import OUT, report
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.registry import choose

MODULES = ("speed", "against", "memory", "start")
WITH_PYTORCH = frozenset({"speed", "against"})


@cli.command(
  cli.argument("--tables", default=",".join(MODULES), help="modules: a,b"),
  cli.argument("--rounds", default=7, help="number of timed rounds"),
  OUT,
)
def main(tables: str, rounds: int, out: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""
  # Check the names, and that PyTorch is installed if a table needs it.
  names = [choose("table", name, MODULES) for name in cli.names(tables)]
  for name in WITH_PYTORCH.intersection(names):
    requirements.require("bench", f"The table {name!r}")
  # Import each module just before its tables are measured.
  modules = (importlib.import_module(f"benchmarks.{name}") for name in names)
  report(
    (entry for module in modules for entry in module.tables(rounds).items()),
    out,
  )


if __name__ == "__main__":
  main()
