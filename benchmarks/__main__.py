r"""Tables of docs/performance.md: speed and memory beside PyTorch.

pip install -e '.[bench]' && python -m benchmarks --out performance.json

Prints Markdown, and writes JSON with hardware and versions for
`benchmarks.compare`. All calls of a row take turns in every round, on as many
threads; tables show medians, and ratios are medians of the rounds' ratios.
Compilation is not counted. The tables take about an hour on two cores. `python
-m benchmarks.speed` makes the tables of that module alone, as does --tables
speed.
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
  cli.argument("--rounds", default=7, help="timed rounds"),
  OUT,
)
def main(tables: str, rounds: int, out: str) -> None:
  """Prints the tables, and writes them as JSON if asked."""
  names = [choose("table", name, MODULES) for name in cli.names(tables)]
  for name in WITH_PYTORCH.intersection(names):
    requirements.require("bench", f"The table {name!r}")
  modules = (importlib.import_module(f"benchmarks.{name}") for name in names)
  report(
    (entry for module in modules for entry in module.tables(rounds).items()),
    out,
  )


if __name__ == "__main__":
  main()
