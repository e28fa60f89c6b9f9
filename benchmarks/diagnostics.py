r"""The matrix of diagnostics as records, from finished runs.

python launch/tables.py diagnostics --workdir runs/diagnostics
python -m benchmarks.diagnostics runs/diagnostics \
    --out results/diagnostics.jsonl

The command replaces the tables `matrix`, a record for each encoder, and
`telling` of the file, and keeps its other tables. A cell has the median over
seeds at the length of training and at four times it, and what theory says.
Minutes are the mean over the runs of a row.
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
TELLING = (
  "transformer",
  "lru",
  "mamba",
  "mamba, signed",
  "deltaproduct, no decay or convolution",
)


def record(name: str, cells: diagnostics.Cells) -> dict[str, Any]:
  """Returns the record of an encoder.

  Args:
    name: name of the row.
    cells: runs of the seeds, by column.
  """
  every: list[Result] = [run for seeds in cells.values() for run in seeds]
  first = every[0]
  problems = [run["config"]["task"]["problem"] for run in every]
  # Name the config of the first run, with the options of its row.
  arguments = f"problem={problems[0]},model={first['model']}"
  config = f"diagnostics/{first['task']}:{arguments}"
  config = " ".join([config, *diagnostics.overrides(first["config"])])
  seconds = [run["train_seconds"] for run in every]
  return {
    "table": TABLES[0],
    "row": f"`{name}`",
    "model": first["model"],
    "config": config,
    "protocol": ", ".join(dict.fromkeys(problems)),
    "seeds": sorted({run["seed"] for run in every}),
    "commit": ", ".join(sorted({run["commit"][:7] for run in every})),
    "hardware": ", ".join(sorted({_hardware(run) for run in every})),
    "minutes": round(sum(seconds) / len(seconds) / 60, 1),
    "values": {
      column: diagnostics.cell(seeds) for column, seeds in cells.items()
    },
  }


def _hardware(run: Result) -> str:
  """Returns the device of a run, and the version of JAX."""
  facts = run["hardware"]
  kind = "processor" if facts["platform"] == "cpu" else "device_kind"
  device = f"{facts['devices']} x {facts[kind]}"
  return f"{device} (shared), jax {run['versions']['jax']}"


def _model(cells: diagnostics.Cells) -> str:
  """Returns the name of the model of a row."""
  return str(next(iter(cells.values()))[0]["model"])


def records(finished: Sequence[Result]) -> list[dict[str, Any]]:
  """Returns the records of all encoders, in the order of the plan."""
  rows = diagnostics.rows_of(finished)
  order = {name: number for number, name in enumerate(plans.ENCODERS)}
  rows.sort(key=lambda row: order.get(_model(row[1]), len(order)))
  columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
  made = [record(*row) for row in rows]
  for each in made:
    # Every record has the columns in one order.
    each["values"] = {c: each["values"].get(c) for c in columns}
  # The first recipe of an encoder counts.
  named = {each["row"].strip("`"): each for each in reversed(made)}
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
  new = path.with_suffix(".new")
  new.unlink(missing_ok=True)
  append(new, [*kept, *made])
  new.replace(path)


if __name__ == "__main__":
  main()
