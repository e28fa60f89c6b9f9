r"""The matrix of diagnostics as records, from finished runs.

python launch/tables.py diagnostics --workdir runs/diagnostics
python -m benchmarks.diagnostics runs/diagnostics \
    --out results/diagnostics.jsonl --picture docs/figures/diagnostics.png

The command writes the tables `matrix`, a record for each encoder, and
`telling`, and keeps the other tables of the file. A cell has the median over
seeds at the length of training and at four times it, and what theory says.
Cells of the file without a run in the folders stay as they are, so that a table
can be filled on several machines. With --seeds=0,1,2 cells without all of these
seeds stay, too: a median of two seeds would replace the value of a third one.
Minutes are the mean over the cells of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs import RECORDS, append, read, short_commits
from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
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
  commits = {each for run in every for each in short_commits(run["commit"])}
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
    "commit": ", ".join(sorted(commits)),
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


def _order(column: str) -> int:
  """Returns the place of a column: the place of its problem in the plan."""
  configs = plans.PLANS["diagnostics"].configs
  problems = [config.partition("problem=")[2] for config in configs]
  problem = column.partition(",")[0]
  return problems.index(problem) if problem in problems else len(problems)


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
  """Returns a record with the cells of both; cells of `new` count."""
  joined = old | {"values": old["values"] | new["values"]}
  kept = old["values"].keys() - new["values"].keys()
  counts = [len(kept), len(new["values"])]
  minutes = old["minutes"] * counts[0] + new["minutes"] * counts[1]
  joined["minutes"] = round(minutes / sum(counts), 1)
  joined["seeds"] = sorted({*old["seeds"], *new["seeds"]})
  for name in ("protocol", "commit", "hardware"):
    parts = old[name].split(", ") + new[name].split(", ")
    joined[name] = ", ".join(dict.fromkeys(parts))
  return joined


def records(
  finished: Sequence[Result],
  earlier: Sequence[dict[str, Any]] = (),
  seeds: Sequence[int] = (),
) -> list[dict[str, Any]]:
  """Returns the records of all encoders, in the order of the plan.

  Args:
    finished: contents of `results.json`.
    earlier: records of the table `matrix` whose cells are kept.
    seeds: seeds that a cell must have; others are left out.
  """
  # The first recipe of an encoder counts.
  new: dict[str, dict[str, Any]] = {}
  for name, cells in diagnostics.rows_of(finished):
    complete = {
      column: every
      for column, every in cells.items()
      if {*seeds} <= {run["seed"] for run in every}
    }
    if complete:
      new.setdefault(f"`{name}`", record(name, complete))
  # Join the records with the earlier ones, without their empty cells.
  named = {}
  for each in earlier:
    values = {c: text for c, text in each["values"].items() if text}
    named[each["row"]] = each | {"values": values}
  for row, each in new.items():
    named[row] = _joined(named[row], each) if row in named else each
  order = {name: number for number, name in enumerate(plans.ENCODERS)}
  matrix = sorted(
    named.values(), key=lambda r: order.get(r["model"], len(order))
  )
  columns = dict.fromkeys(
    column for each in matrix for column in each["values"]
  )
  ordered = sorted(columns, key=_order)
  for each in matrix:
    # Every record has the columns in one order.
    each["values"] = {c: each["values"].get(c) for c in ordered}
  rows = {each["row"].strip("`"): each for each in matrix}
  return matrix + [
    rows[name] | {"table": TABLES[1]} for name in TELLING if name in rows
  ]


def figure(matrix: Sequence[dict[str, Any]]) -> Figure:
  """Returns the figure of the records of the table `matrix`."""
  rows = []
  for each in matrix:
    for column, text in each["values"].items():
      # The last part of a cell is what theory says.
      shares = (text or "").split("; ")[:-1]
      medians = [float(share.split()[0]) for share in shares]
      medians += [math.nan] * (2 - len(medians))
      problem = column.partition(",")[0]
      for title, median in zip(
        (column, f"{problem}, longer"), medians, strict=True
      ):
        rows.append((each["row"].strip("`"), title, median))
  caption = (
    "Median over seeds, in percent. Empty cells have no run, or the mixer does "
    "not read this length."
  )
  texts = Texts("diagnostics", "What each encoder has learned", caption)
  return plots.scores(texts, rows)


@cli.command(
  cli.argument("workdirs", nargs="+", type=Path, help="folders of runs"),
  RECORDS,
  cli.argument("--picture", type=Path, help="PNG file for a figure of it"),
  cli.option("seeds", "", "seeds that a cell must have (default: any)"),
)
def main(
  workdirs: list[Path], out: Path, picture: Path | None, seeds: str
) -> None:
  """Writes the table of the runs to a file of records."""
  discovered, _ = runs.discover(workdirs)
  finished = [run.results for run in discovered if run.results]
  if not diagnostics.rows_of(finished):
    raise UserError(f"{workdirs} have no finished diagnostics: run them first.")
  old = read(out)
  earlier = [each for each in old if each["table"] == TABLES[0]]
  needed = cli.numbers("seeds", seeds) if seeds else []
  tables = records(finished, earlier, needed)
  # Write all tables to a new file, and replace the old one.
  new = out.with_suffix(".new")
  new.unlink(missing_ok=True)
  append(new, [*(each for each in old if each["table"] not in TABLES), *tables])
  new.replace(out)
  if picture:
    rows = [each for each in tables if each["table"] == TABLES[0]]
    picture.write_bytes(figure(rows).picture("png"))


if __name__ == "__main__":
  main()
