"""Figures and tables that need no models: curves, scores and speeds."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.analysis.tables import depth, diagnostics, runs
from jaxformers.analysis.tables import results as tables
from jaxformers.analysis.tables.runs import RunRecord, SeedGroup
from jaxformers.foundations.tables import markdown_table

MOST_PANELS = 6  # Largest number of quantities among the training curves.
# Labels of the scores of tokens and of whole sequences.
PERCENT = {name: f"{name.replace('_', ' ')} %" for name in tables.BY_LENGTH}
SPEED_COLUMNS = (
  "run",
  "parameters",
  "x Transformer",
  "examples/s in training",
  "on",
)


def training(groups: Sequence[SeedGroup]) -> Figure:
  """Returns the figure of losses and selection scores over steps."""
  # Draw metrics named SPLIT/METRIC, and not others such as speeds.
  rows = [
    (group.label, run.seed, key, record["step"], value)
    for group in groups
    for run in group.runs
    for record in run.metrics
    for key, value in record.items()
    if "/" in key and value is not None
  ]
  caption = (
    "Values on train are means over log_steps steps; values on other splits "
    "are means over the whole split. Bands are one deviation over seeds "
    f"({runs.describe_seeds(groups)}). At most six quantities are drawn."
  )
  titles = _titles(rows)
  rows = [row for row in rows if row[2] in titles]
  texts = Texts("training", "Training curves", caption)
  return plots.curves(texts, rows, "step", titles, markers=False)


def _titles(rows: Sequence[tuple[Any, ...]]) -> dict[str, str]:
  """Returns titles of at most `MOST_PANELS` quantities, the losses first."""
  keys = sorted({row[2] for row in rows}, key=lambda k: (k[-4:] != "loss", k))
  titles = {}
  for key in keys[:MOST_PANELS]:
    split, _, metric = key.partition("/")
    unit = ", nats" if metric == "loss" else ""
    titles[key] = f"{metric.replace('_', ' ')} on {split}{unit}"
  return titles


def over_minutes(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns the figure of selection scores over minutes; None without times.

  Minutes include the start of the run, compilation and evaluations.
  """
  rows = []
  for group in groups:
    scored = [
      (run.seed, record)
      for run in group.runs
      for record in run.metrics
      if "wall_seconds" in record
    ]
    # A step has the mean time of all seeds, so that a band has their scores.
    times = collections.defaultdict(list)
    for _, record in scored:
      times[record["step"]].append(record["wall_seconds"] / 60)
    rows += [
      (group.label, seed, key, statistics.mean(times[record["step"]]), value)
      for seed, record in scored
      for key, value in record.items()
      if "/" in key and value is not None
    ]
  if not rows:
    return None
  caption = (
    "Means over the whole split that selects the checkpoint. Minutes since the "
    "start, with compilation and evaluations. Bands are one deviation over "
    f"seeds ({runs.describe_seeds(groups)})."
  )
  texts = Texts("over_minutes", "Score over minutes", caption)
  return plots.curves(texts, rows, "minutes", _titles(rows))


def by_length(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns the figure of test scores over lengths; None without such scores.

  `Task.test_lengths` has the lengths.
  """
  rows = [
    (group.label, run.seed, metric, int(length), 100 * scores[metric])
    for group in groups
    for run in group.runs
    for length, scores in run.results.get("by_length", {}).items()
    for metric in tables.BY_LENGTH
  ]
  if not rows:
    return None
  caption = (
    "Scores on test splits of one length each. A sequence is right if all its "
    "labels are. Bands are one deviation over seeds "
    f"({runs.describe_seeds(groups)})."
  )
  texts = Texts("by_length", "Score over length", caption)
  return plots.curves(texts, rows, "tokens", PERCENT)


def matrix(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns the figure of encoders by diagnostic problems; None without runs.

  See `diagnostics.matrix` for the scores.
  """
  ended = [run.results for g in groups for run in g.runs if run.results]
  rows = []
  names: list[str] = []
  for name, cells in diagnostics.rows_of(ended):
    names.append(name)
    # Recipes of one encoder have a number.
    title = name + f" [{names.count(name)}]" * (names.count(name) > 1)
    for of_seeds in cells.values():
      problem = diagnostics.problem_name(of_seeds[0])
      for length, score in diagnostics.scores(of_seeds):
        rows.append((title, f"{problem}, {length}", score))
  if len({row[0] for row in rows}) < 2:
    return None
  caption = (
    "Median over seeds of the share of right sequences (state tracking) or "
    "tokens (recall), on tests of the shortest length and of four times it."
  )
  texts = Texts("matrix", "What each encoder has learned", caption)
  return plots.scores(texts, rows)


def by_state(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns the figure of recall over bytes of the state; None without it.

  Recipes of one encoder on the same problem are one line, unless some of them
  have equal states. Then learning rates and other fields outside of the model
  have a line each.

  Source: Arora, Eyuboglu et al. 2024, https://arxiv.org/abs/2402.18668, figure
  2, where the state of a model limits how much it recalls.
  """
  points = [
    (group, run, (_state_line(run), run.results["state_bytes"]))
    for group in groups
    for run in group.runs
    if "state_bytes" in run.results and run.results["task"] == "recall"
  ]
  titles = _distinct([(line, size, group) for group, _, (line, size) in points])
  rows = [
    (
      titles[point[0], group.label],
      run.seed,
      metric,
      point[1],
      100 * run.results[metric],
    )
    for group, run, point in points
    for metric in tables.BY_LENGTH
    if metric in run.results
  ]
  rows.sort(key=lambda row: row[3])
  if len({row[3] for row in rows}) < 2:
    return None
  caption = (
    "Scores on test over the bytes of the state of one sequence of training's "
    "length: keys and values of attention, or the state of a recurrence. Mean "
    f"and deviation over seeds ({runs.describe_seeds(groups)})."
  )
  texts = Texts("by_state", "Recall over bytes of the state", caption)
  return plots.curves(texts, rows, "bytes of the state", PERCENT, log="x")


def _distinct(
  points: Sequence[tuple[str, int, SeedGroup]],
) -> dict[tuple[str, str], str]:
  """Returns the title of the line of each group, by its line and label.

  Args:
    points: line, bytes of the state and group of each run.
  """
  titles: dict[tuple[str, str], str] = {}
  for line in dict.fromkeys(line for line, *_ in points):
    groups = {g.label: (size, g) for each, size, g in points if each == line}
    flat = {k: tables.labelled_fields(g.config) for k, (_, g) in groups.items()}
    others = {
      label: [
        key
        for key in tables.differing_keys(fields, [*flat.values()])
        if not key.startswith("model.")
      ]
      for label, fields in flat.items()
    }
    forms = (
      dict.fromkeys(groups, line),
      {
        label: ", ".join([line, *tables.assignments(flat[label], keys)])
        for label, keys in others.items()
      },
      # Other options of the model may leave the size of the state unchanged.
      {label: f"{line}: {label}" for label in groups},
    )
    # Take the first form in which every point of a line has its own size.
    for form in forms:
      if len({(form[k], size) for k, (size, _) in groups.items()}) == len(
        groups
      ):
        break
    titles |= {(line, label): title for label, title in form.items()}
  return titles


def _state_line(run: RunRecord) -> str:
  """Returns the name of a run's line in `by_state`."""
  name = diagnostics.row_name(run.config)
  pairs = run.config["task"].get("num_pairs", 0)
  suffix = f", {pairs} pairs" if pairs else ""
  return f"{name}, {diagnostics.problem_name(run.results)}{suffix}"


def sizes(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns the figure of test scores against the sizes of the model.

  The sizes are depth, width, experts, heads and dropout (`runs.SIZES`). Returns
  None if no two runs of the same model and task differ in one of them.

  Source: TransJect, figure 3.
  """
  groups = [g for g in groups if any(run.results for run in g.runs)]
  metrics = [_score(run)[0] for g in groups for run in g.runs if run.results]
  # Draw only the most frequent metric, since the axis has one unit.
  metric = max(metrics, key=metrics.count) if metrics else ""
  rows = [
    (line, run.seed, name, value, _score(run)[1])
    for line, name, value, group in runs.by_size(groups)
    for run in group.runs
    if run.results and _score(run)[0] == metric
  ]
  if not rows:
    return None
  caption = (
    "Scores on test, mean and deviation over seeds "
    f"({runs.describe_seeds(groups)}). The runs of a line differ only in the "
    "size."
  )
  texts = Texts("sizes", "Score against the size of the model", caption)
  return plots.against(texts, rows, runs.SIZES, metric)


def _score(run: RunRecord) -> tuple[str, float]:
  """Returns the title of a run's metric, and the test score."""
  metric = run.results.get("metric", "accuracy")
  scale = 1 if metric in tables.LOWER_IS_BETTER else 100
  return tables.TITLES[metric], scale * run.results[metric]


def speeds(groups: Sequence[SeedGroup]) -> str:
  """Returns the Markdown table of parameters and training speeds.

  The speed is the median of all logged examples per second, of all seeds that
  ran on the hardware of the first one.
  Returns "" if no run has ended.

  Source: TransJect, table 3.
  """
  lines = []
  for group in groups:
    ended = [run for run in group.runs if run.results]
    if not ended:
      continue
    # Collect the logged speeds of the seeds with the hardware of the first one.
    alike = tables.on_hardware_of_first([run.results for run in ended])
    rates = [
      record["examples_per_second"]
      for run in ended
      if run.results in alike
      for record in run.metrics
      if "examples_per_second" in record
    ]
    # Take sizes and hardware from the first seed.
    results = ended[0].results
    hardware = results.get("hardware", {})
    count, kind = (hardware.get(k, "?") for k in ("devices", "device_kind"))
    sizes = (f"{results['parameters']:,}", f"{results['parameter_ratio']:.2f}")
    speed = f"{statistics.median(rates):.4g}" if rates else ""
    lines.append((group.label, *sizes, speed, f"{count} {kind}"))
  return markdown_table(SPEED_COLUMNS, lines) if lines else ""


def depth_against_width(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns the figure of losses over parameters, by depth.

  Only language models are drawn. Returns None if they do not have at least two
  depths.

  Source: Levine et al. 2020, figure 2.
  """
  results = [
    run.results
    for group in groups
    for run in group.runs
    if run.results.get("metric") == "perplexity"
  ]
  # Depth cannot be compared if all runs have the same depth.
  if len({r["config"]["model"]["num_layers"] for r in results}) < 2:
    return None
  return depth.figure(depth.select_points(results))
