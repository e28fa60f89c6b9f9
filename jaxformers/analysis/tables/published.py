"""Compares our runs with the tables of the papers (`papers.py`)."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformers import config as configs
from jaxformers.analysis.tables import results
from jaxformers.analysis.tables.papers import RUNS, TABLES, Column, Table
from jaxformers.analysis.tables.results import Result
from jaxformers.foundations.tables import markdown_table, plus_minus, spread

# Protocol under which the sizes of a model depend on the task.
SIZES_BY_TASK = "lra"
# Largest relative difference of two lengths of training that count as equal.
SAME_LENGTH = 0.01


class Score(NamedTuple):
  """Score of one recipe over its seeds.

  Attributes:
    mean, deviation: score in the units of the table. The deviation of a single
      seed is NaN.
    seeds: number of seeds.
    examples: number of test examples of an accuracy; 0 for other scores.
    mismatch: reason why the score is not comparable with the paper's number; ""
      if it is.
  """

  mean: float
  deviation: float
  seeds: int
  examples: int
  mismatch: str = ""

  def difference(
    self, printed: float, deviation: float = 0.0
  ) -> tuple[float, float]:
    """Returns our mean minus the paper's, absolute and in standard errors.

    The variance has three parts: the variance of the mean over our seeds, the
    variance of the mean over the paper's `RUNS` runs, and the binomial variance
    of both accuracies over the test examples. A single seed of ours has the
    paper's deviation. The difference in standard errors is NaN if the variance
    is 0.

    Args:
      printed: the paper's number.
      deviation: the paper's deviation over its runs; 0 if it prints none.
    """
    ours = self.deviation if self.seeds > 1 else deviation
    variance = ours**2 / self.seeds + deviation**2 / RUNS
    # Binomial variance of an accuracy p in percent: p (100 - p) / examples.
    if self.examples:
      shares = sum(p * (100 - p) for p in (self.mean, printed))
      variance += shares / self.examples
    gap = self.mean - printed
    return gap, gap / math.sqrt(variance) if variance else math.nan


class Row(NamedTuple):
  """Scores of a model under one recipe.

  Attributes:
    name: name of the model, or name of the row in the paper's table.
    label: layers, width and protocol of our runs; "" without runs.
    theirs: the paper's numbers, by title of the column; {} without numbers.
    ours: our scores, by title of the column.
    recipes: recipe of our runs, by task.
    deviations: the paper's deviations, by title of the column; {} without
      deviations.
  """

  name: str
  label: str
  theirs: Mapping[str, float]
  ours: dict[str, Score]
  recipes: dict[str, str]
  deviations: Mapping[str, float] = {}

  @property
  def title(self) -> str:
    """Name and label."""
    return f"{self.name} ({self.label})"

  def takes(self, column: Column, recipe: str) -> bool:
    """Returns True if a recipe can fill a column of this row.

    All columns of one task have the same recipe.
    """
    is_free = column.title not in self.ours
    return is_free and self.recipes.get(column.task, recipe) == recipe


class Filled(NamedTuple):
  """Published table with the scores of our runs.

  Attributes:
    table: the published table.
    rows: rows with the paper's numbers and our scores.
  """

  table: Table
  rows: list[Row]


class Measured(NamedTuple):
  """Score of a run.

  Attributes:
    value: the score.
    how: settings with which the score was computed, such as split, stride and
      scales.
    examples: number of examples that were scored.
  """

  value: float
  how: Mapping[str, Any]
  examples: int


def measured(run: Result, column: Column) -> Measured | None:
  """Returns the score of a run for a column, or None if there is none.

  A score that was computed with the settings of the column is preferred.

  Args:
    run: content of `results.json`, with `scores` from `scores.json`.
    column: column of a table.
  """
  candidates = []
  # Put the score of training first, which wins a tie.
  if column.score in run:
    how = _how_training_scores(run)
    candidates.append(Measured(run[column.score], how, run.get("examples", 0)))
  for record in run.get("scores", ()):
    # Skip scores of a checkpoint that is no longer the best one.
    is_best = record["step"] == run.get("best_step", record["step"])
    is_asked = record["command"] == column.command and is_best
    if is_asked and column.score in record["scores"]:
      value = record["scores"][column.score]
      candidates.append(Measured(value, record["how"], record["examples"]))
  # Drop scores that differ in a setting of `shown`.
  if column.command:
    candidates = [
      score
      for score in candidates
      if all(score.how.get(k) == column.how[k] for k in column.shown)
    ]
  return min(candidates, key=lambda s: s.how != column.how, default=None)


def _how_training_scores(run: Result) -> dict[str, Any]:
  """Returns the settings of the score at the end of training."""
  how = {k: v for k, v in run.get("scored", {}).items() if k != "epochs"}
  return {"split": "test", **how}


def mismatch(run: Result, column: Column, table: Table) -> str:
  """Returns the reasons why a run is not comparable with a column.

  The result is "" if the run is comparable.
  """
  protocol = run["protocol"]
  protocols = table.own_protocols.get(run["model"], table.protocols)
  row = row_name(run, table)
  score = measured(run, column)
  reasons = []
  if remark := table.remarks.get(row):
    reasons.append(remark)
  if protocol not in protocols:
    reasons.append(f"protocol {protocol}, not {' or '.join(protocols)}")
  # Compare whether training starts from trained weights.
  is_asked = table.is_pretrained or "pretrained" in table.rows.get(row, {})
  pretrained = run["config"].get("pretrained")
  if pretrained and not is_asked:
    reasons.append("begins with trained weights")
  elif table.is_pretrained and pretrained == "":
    reasons.append("begins without trained weights")
  # Compare the settings of the score.
  if score and column.command and dict(score.how) != dict(column.how):
    reasons.append(_describe_difference(score.how, column.how))
  # Compare the number of test examples and their length.
  if score and column.examples and score.examples != column.examples:
    scored = f"{score.examples:,} test examples"
    reasons.append(f"{scored}, not {column.examples:,}")
  if run["max_len"] < column.length:
    cut = f"cut to {run['max_len']:,} tokens"
    reasons.append(f"{cut}, not {column.length:,}")
  if column.source not in run["data"].get("source", ""):
    reasons.append(f"{run['data'].get('source')}, not {column.source}")
  # Compare the task's options; a missing option counts as the published one.
  options = run["config"]["task"]
  reasons += [
    f"{name}={options[name]}, not {value}"
    for name, value in column.options.items()
    if options.get(name, value) != value
  ]
  # Compare the fields of the config, and the length of training.
  fields = configs.flatten(run["config"])
  reasons += [
    f"{name.rpartition('.')[2]}={fields.get(name)}, not {_any_of(value)}"
    for name, value in table.fields.get(row, {}).items()
    if not _agrees(fields.get(name), value)
  ]
  return "; ".join([*reasons, *_training_differs(run, column, table, row)])


def _describe_difference(
  how: Mapping[str, Any], wanted: Mapping[str, Any]
) -> str:
  """Returns the difference between two settings of a score, in words."""

  def listed(entries: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    parts = [f"{k}={v}" for k, v in entries.items() if others.get(k) != v]
    return ", ".join(parts) or "all"

  return f"scored with {listed(how, wanted)}, not {listed(wanted, how)}"


def _training_differs(
  run: Result, column: Column, table: Table, row: str
) -> list[str]:
  """Returns the reason if the length of training differs, or []."""
  trainings = table.trainings.get(row, {})
  wanted = trainings.get(column.title, column.training)
  config = run["config"]
  steps, batch_size = config.get("total_steps"), config.get("batch_size")
  # A missing length counts as the published one.
  if wanted is None or steps is None or batch_size is None:
    return []
  ratio = steps * batch_size / (wanted.steps * wanted.batch_size)
  if abs(ratio - 1) <= SAME_LENGTH:
    return []
  length = f"{steps:,} steps of {batch_size:,}"
  return [f"{length}, not {wanted.steps:,} of {wanted.batch_size:,}"]


def _agrees(field: Any, value: Any) -> bool:
  """Returns True if the field of a config agrees with a value of `rows`."""
  if isinstance(value, tuple):
    return field in value
  return bool(field) == value if isinstance(value, bool) else field == value


def _any_of(value: Any) -> str:
  """Returns a value of `Table.rows` in words, such as "1 or 2"."""
  values = value if isinstance(value, tuple) else (value,)
  return " or ".join(str(v) for v in values if v is not None)


def row_name(run: Result, table: Table) -> str:
  """Returns the name of a run's row in a table.

  The name is a key of `table.rows` whose fields agree, or the run's model. If
  the table has rows for the model and none of them agrees, the name has the
  suffix "otherwise".
  """
  if not table.rows:
    return str(run["model"])
  fields = configs.flatten(run["config"])
  for name, wanted in table.rows.items():
    if all(_agrees(fields.get(k), value) for k, value in wanted.items()):
      return name
  is_known = any(run["model"] in name.split(", ") for name in table.rows)
  return f"{run['model']}, otherwise" if is_known else str(run["model"])


def fill(table: Table, runs: Sequence[Result]) -> Filled:
  """Returns a table with the paper's rows, followed by our other models.

  Each of our recipes is a row. Recipes of different tasks share a row if their
  layers, width and protocol agree, in the order of the runs. Under the protocol
  "lra", in which sizes depend on the task, recipes share a row if the protocol
  agrees.

  Args:
    table: published table.
    runs: contents of `results.json`. Runs of other tasks are ignored.
  """
  rows: dict[str, list[Row]] = {name: [] for name in table.scores}
  for column in table.columns:
    # Group the runs of the column's task by recipe.
    fitting = (
      r for r in runs if r["task"] == column.task and measured(r, column)
    )
    for by_seed in results.by_seed(fitting):
      first, scores = _score_alike(list(by_seed.values()), column)
      # Find the row of the recipe by its name and label.
      name = row_name(first, table)
      if name not in table.scores and not table.has_others:
        continue
      label = f"{results.describe_size(first)}, {first['protocol']}"
      if first["protocol"] == SIZES_BY_TASK:
        label = f"{SIZES_BY_TASK}'s sizes, {SIZES_BY_TASK}"
      of_model = rows.setdefault(name, [])
      # A second recipe with the same label gets a new row.
      recipe = results.recipe(first)
      alike = (r for r in of_model if r.label == label)
      row = next((r for r in alike if r.takes(column, recipe)), None)
      if row is None:
        row = Row(name, label, {}, {}, {})
        of_model.append(row)
      row.recipes[column.task] = recipe
      row.ours[column.title] = Score(
        *spread([column.scale * score.value for score in scores]),
        len(scores),
        scores[0].examples if column.score.startswith("accuracy") else 0,
        mismatch(first, column, table),
      )
  # Add the paper's numbers; a model that we have not run keeps its row.
  filled = []
  for name, of_model in rows.items():
    numbers = zip(table.columns, table.scores.get(name, ()), strict=False)
    theirs = {c.title: value for c, value in numbers if value is not None}
    titles = [column.title for column in table.columns]
    spreads = dict(zip(titles, table.deviations.get(name, ()), strict=False))
    ours = of_model or [Row(name, "", {}, {}, {})]
    filled += [row._replace(theirs=theirs, deviations=spreads) for row in ours]
  return Filled(table, filled)


def _score_alike(
  seeds: Sequence[Result], column: Column
) -> tuple[Result, list[Measured]]:
  """Returns the first run and the scores that share its settings.

  If the seeds were scored with different settings, the published settings are
  preferred. Seeds of a recipe share protocol and test examples.
  """
  pairs = [(run, score) for run in seeds if (score := measured(run, column))]
  first, chosen = min(pairs, key=lambda pair: pair[1].how != column.how)
  return first, [score for _, score in pairs if score.how == chosen.how]


def _cells(row: Row, column: Column, plus: str) -> tuple[str, str]:
  """Returns the paper's number, and our score with the difference.

  Args:
    row: row of the table.
    column: column of the table.
    plus: sign between mean and deviation.
  """
  title, digits = column.title, column.digits
  theirs, ours = row.theirs.get(title), row.ours.get(title)
  deviation = row.deviations.get(title, 0.0)
  printed = "" if theirs is None else f"{theirs:.{digits}f}"
  if theirs is not None and deviation:
    printed = plus_minus(theirs, deviation, digits + 1, plus)
  if ours is None:
    return printed, ""
  text = plus_minus(ours.mean, ours.deviation, digits, plus)
  # Print a star instead of the difference if the score is not comparable.
  if ours.mismatch:
    text += " *"
  elif theirs is not None:
    gap, errors = ours.difference(theirs, deviation)
    in_errors = "" if math.isnan(errors) else f", {abs(errors):.1f} s.e."
    text += f" ({gap:+.{digits}f}{in_errors})"
  return printed, text


def _shared(filled: Filled) -> list[str]:
  """Returns the titles that several rows of a table have."""
  counts = collections.Counter(row.title for row in filled.rows)
  return [title for title, count in counts.items() if count > 1]


def _average(row: Row, filled: Filled) -> tuple[str, str]:
  """Returns the paper's and our mean over all columns, "" if one is missing.

  Ours is "", too, if rows share the label: any of their recipes could belong
  together.
  """
  table = filled.table
  titles = [column.title for column in table.columns]
  theirs = [row.theirs[title] for title in titles if title in row.theirs]
  ours = [row.ours[title] for title in titles if title in row.ours]
  printed, mean = "", ""
  if len(theirs) == len(titles):
    printed = f"{sum(theirs) / len(titles):.1f}"
  if len(ours) == len(titles) and row.title not in _shared(filled):
    mean = f"{sum(score.mean for score in ours) / len(titles):.1f}"
    mean += " *" if any(score.mismatch for score in ours) else ""
  return printed, mean


def _lines(filled: Filled, plus: str) -> list[list[str]]:
  """Returns a table as text cells: the titles, and then each row."""
  table = filled.table
  titles = [column.title for column in table.columns]
  named = [*titles, "Avg."] if table.has_average else titles
  head = [f"{title}, {side}" for title in named for side in ("paper", "ours")]
  lines = [["model", "ours", *head]]
  for row in filled.rows:
    cells = [c for column in table.columns for c in _cells(row, column, plus)]
    if table.has_average:
      cells += _average(row, filled)
    lines.append([row.name, row.label, *cells])
  return lines


def markdown(filled: Filled) -> str:
  """Returns a filled table in Markdown."""
  head, *lines = _lines(filled, "+-")
  return markdown_table(head, lines)


# Escape sequences of the letters that are commands in TeX.
_TEX = str.maketrans(
  {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\n": " ",
  }
)


def latex(filled: Filled) -> str:
  """Returns a filled table as a LaTeX tabular, for the package booktabs."""
  # Escape the cells, and join them to rows.
  lines = _lines(filled, "+-")
  head, *body = (
    " & ".join(cell.translate(_TEX) for cell in cells).replace("+-", r"$\pm$")
    + r" \\"
    for cells in lines
  )
  # Each task has two columns, for the paper's number and for ours.
  pairs = (len(lines[0]) - 2) // 2
  begin = rf"\begin{{tabular}}{{ll{'rl' * pairs}}}"
  rules = (begin, r"\toprule", head, r"\midrule")
  return "\n".join([*rules, *body, r"\bottomrule", r"\end{tabular}"])


def notes(filled: Filled) -> list[str]:
  """Returns a line for each reason of a star, with its column and models.

  Another line names the rows without an average, see `_average`.
  """
  # Join the models that share a reason.
  models: dict[tuple[str, str], list[str]] = {}
  for row in filled.rows:
    for title, score in row.ours.items():
      if score.mismatch:
        models.setdefault((title, score.mismatch), []).append(row.name)
  lines = [
    f"* {title} ({', '.join(dict.fromkeys(names))}): {reason}."
    for (title, reason), names in models.items()
  ]
  if filled.table.has_average and (shared := _shared(filled)):
    lines.append(
      f"No average of ours: several recipes are {', '.join(shared)}, and any "
      "of them could belong together."
    )
  return lines


def compares(filled: Filled) -> bool:
  """Returns True if a score of ours is comparable with the paper's."""
  return any(
    not score.mismatch
    for row in filled.rows
    for score in row.ours.values()
    if row.theirs
  )


def tables(runs: Sequence[Result]) -> dict[str, Filled]:
  """Returns the tables for which there are runs, by title.

  Among tables of the same tasks, only those with a comparable run are
  returned. If there is none, the first table is returned.
  """
  by_tasks: dict[tuple[str, ...], list[Filled]] = {}
  for table in TABLES:
    filled = fill(table, runs)
    if any(row.ours for row in filled.rows):
      tasks = tuple(sorted({column.task for column in table.columns}))
      # Ignore Path-X, which only some tables of these tasks have.
      key = tuple(task for task in tasks if task != "pathx")
      by_tasks.setdefault(key, []).append(filled)
  shown = (
    [f for f in group if compares(f)] or group[:1]
    for group in by_tasks.values()
  )
  return {f.table.title: f for group in shown for f in group}


def text(filled: Mapping[str, Filled], *, use_latex: bool = False) -> str:
  """Returns filled tables with titles and notes, in Markdown or LaTeX."""
  # Titles and notes are comments in LaTeX.
  form, mark, comment = markdown, "##", ""
  if use_latex:
    form, mark, comment = latex, "%", "% "
  parts = []
  for title, table in filled.items():
    reasons = "".join(f"{comment}{note}\n" for note in notes(table))
    parts.append(f"{mark} {title}\n\n{form(table)}\n\n{reasons}")
  return "\n".join(parts)
