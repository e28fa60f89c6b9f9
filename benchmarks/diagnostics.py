r"""The matrix of diagnostics as records, and as a figure, from finished runs.

python launch/tables.py diagnostics --workdir runs/diagnostics
python -m benchmarks.diagnostics runs/diagnostics \
    --out results/diagnostics.jsonl

The command writes the tables `matrix`, a record for each encoder, and `telling`
of the file anew, and keeps its other tables. A cell has the median over seeds
at the length of training and at four times it, and what theory says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.data import OUT
from benchmarks.programs import append, read
from jaxformers.analysis.tables import diagnostics, runs
from jaxformers.analysis.tables.results import Result
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.sweep import plans

TABLES = ("matrix", "telling")
# Rows of the short table of the README, `telling`.
TELLING = ("transformer", "neutreno", "lru", "mamba", "mamba, signed")


def record(name: str, cells: diagnostics.Cells) -> dict[str, Any]:
  """Returns the record of an encoder.

  Args:
    name: name of the row.
    cells: runs of the seeds, by column.
  """
  made: list[Result] = [run for seeds in cells.values() for run in seeds]
  first = made[0]
  hardware = first["hardware"]
  processor = f"one core of an {hardware['processor']} (shared)"
  problem, model = first["config"]["task"]["problem"], first["model"]
  problems = (run["config"]["task"]["problem"] for run in made)
  return {
    "table": TABLES[0],
    "row": f"`{name}`",
    "model": model,
    "config": f"diagnostics/{first['task']}:problem={problem},model={model}",
    "protocol": ", ".join(dict.fromkeys(problems)),
    "seeds": sorted({run["seed"] for run in made}),
    "commit": ", ".join(sorted({run["commit"][:7] for run in made})),
    "hardware": f"{processor}, jax {first['versions']['jax']}",
    "minutes": round(sum(run["train_seconds"] for run in made) / 60, 1),
    "values": {
      column: diagnostics.cell(seeds) for column, seeds in cells.items()
    },
  }


def _model(cells: diagnostics.Cells) -> str:
  """Returns the name of the model of a row."""
  return str(next(iter(cells.values()))[0]["model"])


def records(finished: Sequence[Result]) -> list[dict[str, Any]]:
  """Returns the records of all encoders, in the order of the plan."""
  rows = diagnostics.rows_of(finished)
  rows.sort(key=lambda row: plans.ENCODERS.index(_model(row[1])))
  columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
  made = [record(*row) for row in rows]
  for each in made:
    # Every record has the columns in one order.
    each["values"] = {c: each["values"].get(c) for c in columns}
  named = {each["row"].strip("`"): each for each in made}
  return made + [
    named[name] | {"table": TABLES[1]} for name in TELLING if name in named
  ]


@cli.command(
  cli.argument("workdirs", nargs="+", type=Path, help="folders of runs"),
  OUT,
)
def main(workdirs: list[Path], out: str) -> None:
  """Writes the table of the runs to a file of records."""
  found, _ = runs.discover(workdirs)
  made = records([run.results for run in found if run.results])
  if not made:
    raise UserError(f"{workdirs} have no finished diagnostics: run them first.")
  path = Path(out)
  kept = [old for old in read(path) if old["table"] not in TABLES]
  path.write_text("")
  append(path, [*kept, *made])


if __name__ == "__main__":
  main()
