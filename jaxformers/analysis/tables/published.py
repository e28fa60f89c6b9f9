r"""Prints TransJect's tables 1 and 2 with our runs beside the paper's.

python -m jaxformers published runs/* [--latex]

The paper gives accuracies without deviations. It took some of them from Tay et
al. 2021 (table 1) and Chen et al. 2021 (table 2). The difference to ours is
also given in standard errors, which count the spread of our seeds and, on both
sides, the chance of the test examples. The label of a run has its layers, width
and protocol: compare them with the paper's. A run whose test examples are not
the paper's, such as easier images or a stand-in for an archive, has a star
instead of a difference, and the reason stands below the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers import cli
from jaxformers.analysis.tables import results
from jaxformers.analysis.tables.results import Result
from jaxformers.errors import UserError
from jaxformers.tables import markdown_table


class TestSet(NamedTuple):
  """Test examples of a task as published.

  Attributes:
    title: name of the task in the papers.
    examples: number of examples.
    length: number of tokens that the published models read; 0 for any.
    options: published values of the options that change the examples.
  """

  title: str
  examples: int
  length: int = 0
  options: Mapping[str, Any] = {}


LISTOPS_LENGTHS = dict(
  min_length=500, max_length=2_000, test_min_length=0, test_max_length=0
)
TEST_SETS = {
  "imdb": TestSet("IMDb", 25_000, 512),
  "ag_news": TestSet("AG's News", 7_600, 512),
  "listops": TestSet(
    "ListOps",
    2_000,
    options=LISTOPS_LENGTHS
    | {"max_depth": 10, "max_args": 10, "operators": "MIN MAX MED SM"},
  ),
  "text": TestSet("Text", 25_000, 4_000),
  "retrieval": TestSet("Retrieval", 17_437, 4_000),
  "pathfinder": TestSet(
    "Pathfinder", 20_000, options={"difficulty": "hard", "resolution": 32}
  ),
  "image": TestSet("Image", 10_000),
}
SHORT, LONG = (*TEST_SETS,)[:2], (*TEST_SETS,)[2:]
LRA_TEXT_LENGTH = 1_000  # Number of tokens of Text that LRA's own code reads.
# Protocols under which a task is another one, with the reason.
INCOMPARABLE_PROTOCOLS = {
  ("listops", "skyformer"): "without closing brackets the tree is not there"
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
    mismatch: reason why the paper's number does not compare; "" if it does.
  """

  mean: float
  deviation: float
  seeds: int
  examples: int
  mismatch: str = ""

  def difference(self, printed: float) -> tuple[float, float]:
    """Returns our mean less the paper's, in points and in standard errors.

    The error has two parts: the spread of our seeds, which one seed has not,
    and the binomial deviation of both accuracies over the test examples.

    Args:
      printed: accuracy of the paper in percent.
    """
    over_seeds = self.deviation**2 / self.seeds if self.seeds > 1 else 0.0
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
  ours: dict[str, Score]


def mismatch(run: Result) -> str:
  """Returns why the test examples of a run are not the paper's; "" if they are.

  Args:
    run: content of a `results.json` of a task in `TEST_SETS`.
  """
  task, protocol = run["task"], run["protocol"]
  paper = TEST_SETS[task]
  reasons = [INCOMPARABLE_PROTOCOLS.get((task, protocol), "")]
  # Compare the number of test examples and their length.
  if run["examples"] != paper.examples:
    reasons.append(f"{run['examples']:,} test examples, not {paper.examples:,}")
  is_lra_text = (task, protocol) == ("text", "lra")
  length = LRA_TEXT_LENGTH if is_lra_text else paper.length
  if run["max_len"] < length:
    reasons.append(f"cut to {run['max_len']:,} tokens, not {length:,}")
  # An option that the config lacks counts as the published one.
  options = run["config"]["task"]
  reasons += [
    f"{name}={options[name]}, not {value}"
    for name, value in paper.options.items()
    if options.get(name, value) != value
  ]
  return "; ".join(filter(None, reasons))


def rows(
  runs: Sequence[Result],
  tasks: Sequence[str],
  theirs: Mapping[str, Sequence[float]],
) -> list[Row]:
  """Returns the paper's models in its order, and then our other models.

  Each of our recipes is a row. Recipes of several tasks share a row if their
  layers, width and protocol agree.

  Args:
    runs: contents of `results.json`; those of other tasks are left out.
    tasks: tasks of the table.
    theirs: the paper's accuracies by model, in the order of the tasks.
  """
  scored = [r for r in runs if r.get("metric", "accuracy") == "accuracy"]
  table_rows: dict[str, list[Row]] = {model: [] for model in theirs}
  for task in tasks:
    for by_seed in results.by_seed(r for r in scored if r["task"] == task):
      # Seeds of a recipe share protocol and test examples.
      first, *_ = seeds = list(by_seed.values())
      label = f"{results.describe_size(first)}, {first['protocol']}"
      of_model = table_rows.setdefault(first["model"], [])
      # A second recipe of the same sizes stands in a row of its own.
      free = (r for r in of_model if r.label == label and task not in r.ours)
      row = next(free, None)
      if row is None:
        row = Row(first["model"], label, {}, {})
        of_model.append(row)
      mean, deviation = results.spread([100 * r["accuracy"] for r in seeds])
      row.ours[task] = Score(
        mean, deviation, len(seeds), first["examples"], mismatch(first)
      )
  # A model that we have not run has a row, too.
  return [
    row._replace(theirs=dict(zip(tasks, theirs.get(model, ()), strict=False)))
    for model, of_model in table_rows.items()
    for row in of_model or [Row(model, "", {}, {})]
  ]


def _cells(row: Row, task: str, plus: str) -> tuple[str, str]:
  """Returns the paper's accuracy, and ours with the difference."""
  theirs, ours = row.theirs.get(task), row.ours.get(task)
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


def _lines(
  table_rows: Sequence[Row], tasks: Sequence[str], plus: str
) -> list[list[str]]:
  """Returns the titles of the columns, and then the cells of each row."""
  titles = [TEST_SETS[task].title for task in tasks]
  head = [f"{title}, {side}" for title in titles for side in ("paper", "ours")]
  lines = [["model", "ours", *head]]
  for row in table_rows:
    cells = (cell for task in tasks for cell in _cells(row, task, plus))
    lines.append([row.model, row.label, *cells])
  return lines


def markdown(table_rows: Sequence[Row], tasks: Sequence[str]) -> str:
  """Returns the rows as a table in Markdown."""
  head, *lines = _lines(table_rows, tasks, "+-")
  return markdown_table(head, lines)


def latex(table_rows: Sequence[Row], tasks: Sequence[str]) -> str:
  """Returns the rows as a LaTeX tabular, which needs the package booktabs."""
  head, *lines = (
    " & ".join(cells).replace("_", r"\_").replace("%", r"\%") + r" \\"
    for cells in _lines(table_rows, tasks, r"$\pm$")
  )
  # Each task has two columns: the paper's, and ours.
  begin = rf"\begin{{tabular}}{{ll{'rl' * len(tasks)}}}"
  rules = (begin, r"\toprule", head, r"\midrule")
  return "\n".join([*rules, *lines, r"\bottomrule", r"\end{tabular}"])


def notes(table_rows: Sequence[Row]) -> list[str]:
  """Returns a line for each reason of a star: task, models and the reason."""
  # Models with the same reason share a line.
  models: dict[tuple[str, str], list[str]] = {}
  for row in table_rows:
    for task, cell in row.ours.items():
      if cell.mismatch:
        models.setdefault((task, cell.mismatch), []).append(row.model)
  return [
    f"* {TEST_SETS[task].title} ({', '.join(dict.fromkeys(names))}): {reason}."
    for (task, reason), names in models.items()
  ]


def tables(
  runs: Sequence[Result],
) -> dict[str, tuple[Sequence[str], list[Row]]]:
  """Returns tasks and rows, by title, of the tables that have any run."""
  filled = {
    title: (tasks, rows(runs, tasks, theirs))
    for title, (tasks, theirs) in TABLES.items()
  }
  return {
    title: table
    for title, table in filled.items()
    if any(row.ours for row in table[1])
  }


@cli.command(
  cli.WORKDIRS,
  cli.switch("--latex", dest="use_latex", help="print LaTeX tabulars"),
)
def main(workdirs: Sequence[Path], use_latex: bool) -> None:
  """Prints the papers' tables that have any of the runs."""
  filled = tables(results.read(workdirs))
  if not filled:
    raise UserError(
      "no run is of a task of the papers' tables: train one of "
      f"{', '.join(TEST_SETS)}."
    )
  # Titles and notes are comments in LaTeX.
  form, mark, comment = markdown, "##", ""
  if use_latex:
    form, mark, comment = latex, "%", "% "
  for title, (tasks, table_rows) in filled.items():
    print(f"{mark} {title}\n\n{form(table_rows, tasks)}\n")
    print("".join(f"{comment}{note}\n" for note in notes(table_rows)))


if __name__ == "__main__":
  main()
