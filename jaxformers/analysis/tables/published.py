r"""Prints TransJect's tables 1 and 2 with our runs beside the paper's.

python -m jaxformers published runs/* [--latex]

The paper's numbers are accuracies without deviation, some of them taken from
Tay et al. 2021 (table 1) and Chen et al. 2021 (table 2). A difference is given
in standard errors: of our mean over seeds, and of a share of so many test
examples, for either side. Runs of another size or protocol than the paper's are
shown as they are: the label has layers, width and protocol. A score on other
test examples than the paper's, such as easier images or a stand-in for an
archive, has a star instead of a difference, and the reason below the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers import cli
from jaxformers.analysis.tables import results
from jaxformers.errors import UserError
from jaxformers.tables import markdown_table

SHORT = ("imdb", "ag_news")
LONG = ("listops", "text", "retrieval", "pathfinder", "image")
NAMES = {
  "imdb": "IMDb",
  "ag_news": "AG's News",
  "listops": "ListOps",
  "text": "Text",
  "retrieval": "Retrieval",
  "pathfinder": "Pathfinder",
  "image": "Image",
}
# Number of test examples of the data sets as published.
EXAMPLES = {
  "imdb": 25_000,
  "ag_news": 7_600,
  "listops": 2_000,
  "text": 25_000,
  "retrieval": 17_437,
  "pathfinder": 20_000,
  "image": 10_000,
}
# Options that make another task of a task, with their published values.
OPTIONS = {
  "listops": {
    "min_length": 500,
    "max_length": 2_000,
    "test_min_length": 0,
    "test_max_length": 0,
    "max_depth": 10,
    "max_args": 10,
    "operators": "MIN MAX MED SM",
  },
  "pathfinder": {"difficulty": "hard", "resolution": 32},
}
# Tokens of an example that the published models read.
LENGTHS = {
  "imdb": 512,
  "ag_news": 512,
  "text": 4_000,
  "retrieval": 4_000,
}
LRA_TEXT_LENGTH = 1_000  # Tokens of Text that LRA's own code reads.
# Protocols that leave out what a task is about.
INCOMPARABLE_PROTOCOLS = {
  ("listops", "skyformer"): "without closing brackets the tree is not there",
}
# Accuracies in percent by our names of models, in the order of the tasks.
TABLE_1 = {
  "transformer": (81.3, 88.8),
  "transformer_rezero": (83.4, 89.6),
  "transformer_orthogonal": (85.1, 86.3),
  "linformer": (82.8, 86.5),
  "synthesizer": (84.6, 89.1),
  "transject": (88.1, 88.8),
  "random_transject": (86.5, 90.2),
}
TABLE_2 = {
  "transformer": (38.4, 61.9, 80.7, 65.2, 40.6),
  "transformer_rezero": (38.3, 59.1, 79.2, 68.3, 38.6),
  "transformer_orthogonal": (39.6, 58.1, 81.4, 68.9, 42.2),
  "reformer": (37.7, 62.9, 79.0, 66.5, 48.9),
  "bigbird": (39.3, 63.9, 80.3, 68.7, 43.2),
  "linformer": (37.4, 58.9, 78.2, 60.9, 38.0),
  "informer": (32.5, 62.6, 77.6, 57.8, 38.1),
  "nystromformer": (38.5, 64.8, 80.5, 69.5, 41.3),
  "performer": (38.0, 64.2, 80.0, 66.3, 41.4),
  "skyformer": (38.7, 64.7, 82.1, 70.7, 40.8),
  "transject": (42.2, 64.9, 80.3, 71.5, 38.9),
  "random_transject": (40.1, 64.6, 80.2, 72.6, 40.2),
}
TABLES = {
  "Table 1, short text": (SHORT, TABLE_1),
  "Table 2, Long Range Arena": (LONG, TABLE_2),
}


class Score(NamedTuple):
  """Accuracy of one recipe over its seeds.

  Attributes:
    mean, deviation: accuracy in percent; the deviation of one seed is NaN.
    seeds: number of seeds.
    examples: number of test examples.
    mismatch: why this does not compare with the paper's number; "" if it does.
  """

  mean: float
  deviation: float
  seeds: int
  examples: int
  mismatch: str = ""

  def difference(self, printed: float) -> tuple[float, float]:
    """Returns our mean less the paper's, in points and in standard errors.

    Both are shares of `examples`; ours also varies over seeds. One seed has no
    deviation, and then the error is of the examples alone.

    Args:
      printed: accuracy of the paper in percent.
    """
    # Variance of our mean over seeds.
    over_seeds = 0.0
    if self.seeds > 1:
      over_seeds = self.deviation**2 / self.seeds
    # Binomial variance of both shares.
    shares = sum(p * (100 - p) for p in (self.mean, printed)) / self.examples
    error = math.sqrt(over_seeds + shares)
    gap = self.mean - printed
    return gap, gap / error if error else math.copysign(math.inf, gap)


class Row(NamedTuple):
  """Scores of a model under one recipe.

  Attributes:
    model: name of the model.
    label: layers, width and protocol of our runs; "" if we have none.
    theirs: the paper's accuracies by task, in percent; {} if it has none.
    ours: our scores by task.
  """

  model: str
  label: str
  theirs: Mapping[str, float]
  ours: Mapping[str, Score]


def mismatch(run: Mapping[str, Any]) -> str:
  """Returns why a run's test inputs are not the paper's; "" if they are.

  Args:
    run: content of a `results.json` of a task in `EXAMPLES`.
  """
  task, protocol = run["task"], run["protocol"]
  reasons = [INCOMPARABLE_PROTOCOLS.get((task, protocol), "")]
  # Compare the number of test examples and their length.
  if run["examples"] != EXAMPLES[task]:
    reasons.append(f"{run['examples']:,} test examples, not {EXAMPLES[task]:,}")
  length = LENGTHS.get(task, 0)
  if (task, protocol) == ("text", "lra"):
    length = LRA_TEXT_LENGTH
  if run["max_len"] < length:
    reasons.append(f"cut to {run['max_len']:,} tokens, not {length:,}")
  # An option that the config lacks counts as the published one.
  options = run["config"]["task"]
  reasons += [
    f"{name}={options[name]}, not {value}"
    for name, value in OPTIONS.get(task, {}).items()
    if options.get(name, value) != value
  ]
  return "; ".join(filter(None, reasons))


def rows(
  runs: Sequence[Mapping[str, Any]],
  tasks: Sequence[str],
  theirs: Mapping[str, Sequence[float]],
) -> list[Row]:
  """Returns the table's models in its order, then those it has not.

  A recipe of ours is a row; on several tasks it is one row if layers, width and
  protocol agree.

  Args:
    runs: contents of `results.json`; those of other tasks are left out.
    tasks: tasks of the table.
    theirs: the paper's accuracies by model, in the order of the tasks.
  """
  scores = _scores(runs, tasks)
  table_rows = []
  for model in dict.fromkeys([*theirs, *(key[0] for key in scores)]):
    # A model that is not in the paper has no printed accuracies.
    printed = dict(zip(tasks, theirs.get(model, ()), strict=False))
    # A model that we have not run stands alone.
    of_model = [
      Row(model, label, printed, cells)
      for (name, label, _), cells in scores.items()
      if name == model
    ]
    table_rows += of_model or [Row(model, "", printed, {})]
  return table_rows


def _scores(
  runs: Sequence[Mapping[str, Any]], tasks: Sequence[str]
) -> dict[tuple[str, str, int], dict[str, Score]]:
  """Returns scores by (model, label, number) and task."""
  # Gather the seeds of each recipe.
  recipes: dict[tuple[str, str, str, str], dict[int, Mapping[str, Any]]] = {}
  for run in runs:
    if run["task"] in tasks and run.get("metric", "accuracy") == "accuracy":
      model = run["config"]["model"]
      label = f"L={model['num_layers']} d={model['d_model']}, "
      label += run["protocol"]
      key = (run["model"], label, run["task"], results.recipe(run))
      recipes.setdefault(key, {})[run["seed"]] = run
  scores: dict[tuple[str, str, int], dict[str, Score]] = {}
  for (model, label, task, _), seeds in recipes.items():
    # A second recipe of the same sizes stands in a row of its own.
    number = 0
    while task in scores.get((model, label, number), {}):
      number += 1
    accuracies = [100 * run["accuracy"] for run in seeds.values()]
    # Seeds of a recipe share protocol and test examples.
    first = next(iter(seeds.values()))
    scores.setdefault((model, label, number), {})[task] = Score(
      *results.spread(accuracies),
      len(accuracies),
      first["examples"],
      mismatch(first),
    )
  return scores


def _cells(row: Row, task: str, plus: str) -> tuple[str, str]:
  """Returns the paper's accuracy, and ours with the difference."""
  theirs = row.theirs.get(task)
  ours = row.ours.get(task)
  printed = "" if theirs is None else f"{theirs:.1f}"
  if ours is None:
    return printed, ""
  text = results.plus_minus(ours.mean, ours.deviation, 1, plus)
  # A star instead of a difference where inputs differ.
  if ours.mismatch:
    text += " *"
  elif theirs is not None:
    gap, errors = ours.difference(theirs)
    text += f" ({gap:+.1f}, {abs(errors):.1f} s.e.)"
  return printed, text


def _head(tasks: Sequence[str]) -> list[str]:
  return [
    "model",
    "ours",
    *(
      f"{NAMES[task]}, {whose}" for task in tasks for whose in ("paper", "ours")
    ),
  ]


def _lines(
  table_rows: Sequence[Row], tasks: Sequence[str], plus: str
) -> list[list[str]]:
  return [
    [
      row.model,
      row.label,
      *(cell for task in tasks for cell in _cells(row, task, plus)),
    ]
    for row in table_rows
  ]


def markdown(table_rows: Sequence[Row], tasks: Sequence[str]) -> str:
  """Returns the rows as a table in Markdown."""
  return markdown_table(_head(tasks), _lines(table_rows, tasks, "+-"))


def latex(table_rows: Sequence[Row], tasks: Sequence[str]) -> str:
  """Returns the rows as a LaTeX tabular, which needs the package booktabs."""

  def escaped(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%")

  # Each task has two columns: the paper's, and ours.
  lines = [
    rf"\begin{{tabular}}{{ll{'rl' * len(tasks)}}}",
    r"\toprule",
    " & ".join(escaped(cell) for cell in _head(tasks)) + r" \\",
    r"\midrule",
  ]
  lines += [
    " & ".join(escaped(cell) for cell in cells) + r" \\"
    for cells in _lines(table_rows, tasks, r"$\pm$")
  ]
  return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def notes(table_rows: Sequence[Row]) -> list[str]:
  """Returns a line for each reason of a star: task, models and the reason."""
  # Models with the same reason share a line.
  models: dict[tuple[str, str], list[str]] = {}
  for row in table_rows:
    for task, cell in row.ours.items():
      if cell.mismatch:
        models.setdefault((task, cell.mismatch), []).append(row.model)
  return [
    f"* {NAMES[task]} ({', '.join(dict.fromkeys(names))}): {reason}."
    for (task, reason), names in models.items()
  ]


def tables(
  runs: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[Sequence[str], list[Row]]]:
  """Returns tasks and rows of the tables that any run is of, by title."""
  filled = {}
  for title, (tasks, theirs) in TABLES.items():
    table_rows = rows(runs, tasks, theirs)
    if any(row.ours for row in table_rows):
      filled[title] = (tasks, table_rows)
  return filled


@cli.command(
  cli.WORKDIRS,
  cli.switch(
    "--latex",
    dest="use_latex",
    help="print LaTeX tabulars",
  ),
)
def main(workdirs: Sequence[Path], use_latex: bool) -> None:
  """Prints the papers' tables of which any run is."""
  filled = tables(results.read(workdirs))
  if not filled:
    names = ", ".join((*SHORT, *LONG))
    raise UserError(
      f"no run is of a task of the papers' tables: train one of {names}."
    )
  # Titles and notes are comments in LaTeX.
  form, mark, comment = (
    (latex, "%", "% ") if use_latex else (markdown, "##", "")
  )
  for title, (tasks, table_rows) in filled.items():
    print(f"{mark} {title}\n\n{form(table_rows, tasks)}\n")
    for note in notes(table_rows):
      print(comment + note)
    print()


if __name__ == "__main__":
  main()
