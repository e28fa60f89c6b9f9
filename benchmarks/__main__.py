r"""All tables of docs/performance.md: speed and memory beside PyTorch.

pip install -e '.[bench]' && python -m benchmarks --out performance.json

Prints Markdown, and writes JSON with hardware and versions for
`benchmarks.compare`. All calls of a row take turns in every round, on as many
threads; tables show medians, and ratios are medians of the rounds' ratios.
Compilation is not counted. About an hour on two cores; `python -m
benchmarks.speed` makes the tables of that module alone, and --tables those of:
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from benchmarks.data import save, table
from jaxformers.registry import choose

MODULES = ("speed", "against", "memory", "start")


def main(argv: list[str] | None = None) -> None:
  """The command line."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks",
    description=f"{__doc__}{', '.join(MODULES)}",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--tables", default=",".join(MODULES))
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--out", default="", help="path of the JSON")
  args = parser.parse_args(argv)
  names = [choose("table", name, MODULES) for name in args.tables.split(",")]
  found: dict[str, Any] = {}
  for name in names:
    module = importlib.import_module(f"benchmarks.{name}")
    for title, rows in module.tables(args.rounds).items():
      found[title] = rows
      print(f"\n{title}\n\n{table(rows)}", flush=True)
      save(found, args.out)  # Kept even if a later table fails.


if __name__ == "__main__":
  main()
