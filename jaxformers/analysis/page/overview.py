"""Figures and tables of runs without their models: curves, scores, speeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.analysis.tables import depth, runs
from jaxformers.analysis.tables import results as tables
from jaxformers.analysis.tables.runs import RunRecord, SeedGroup
from jaxformers.foundations.tables import markdown_table

MOST_PANELS = 6  # Quantities of the training curves that are drawn.
SPEED_COLUMNS = (
  "run",
  "parameters",
  "x Transformer",
  "examples/s in training",
  "on",
)


def training(groups: Sequence[SeedGroup]) -> Figure:
  """Returns the figure of losses and selection scores over steps."""
  # Keys of metrics are SPLIT/METRIC; others, such as speeds, are not drawn.
  rows = [
    (group.label, run.seed, key, record["step"], value)
    for group in groups
    for run in group.runs
    for record in run.metrics
    for key, value in record.items()
    if "/" in key and value is not None
  ]
  titles = {}
  for key in (row[2] for row in rows):
    split, _, metric = key.partition("/")
    unit = ", nats" if metric == "loss" else ""
    titles[key] = f"{metric.replace('_', ' ')} on {split}{unit}"
  caption = (
    "Means over log_steps steps for train, over the whole split elsewhere; "
    f"bands are one deviation over seeds ({runs.describe_seeds(groups)}). Of "
    "more than six quantities the first six are drawn."
  )
  # Losses come first.
  drawn = sorted(titles, key=lambda k: (not k.endswith("loss"), k))
  panels = {key: titles[key] for key in drawn[:MOST_PANELS]}
  rows = [row for row in rows if row[2] in panels]
  texts = Texts("training", "Training curves", caption)
  return plots.curves(texts, rows, "step", panels, markers=False)


def sizes(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns test scores against depth, width, experts, heads and dropout.

  None if no two runs of one model and task differ in a size.

  Source: TransJect, figure 3.
  """
  groups = [g for g in groups if any(run.results for run in g.runs)]
  metrics = [_score(run)[0] for g in groups for run in g.runs if run.results]
  # One axis has one unit: the most frequent metric.
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
    "On test, mean and deviation over seeds "
    f"({runs.describe_seeds(groups)}); along a line nothing else differs."
  )
  texts = Texts("sizes", "Score against the size of the model", caption)
  return plots.against(texts, rows, runs.SIZES, metric)


def _score(run: RunRecord) -> tuple[str, float]:
  """Returns the title of a run's metric, and its test score."""
  metric = run.results.get("metric", "accuracy")
  scale = 1 if metric in tables.LOWER_IS_BETTER else 100
  return tables.TITLES[metric], scale * run.results[metric]


def speeds(groups: Sequence[SeedGroup]) -> str:
  """Returns a Markdown table of parameters and training speed.

  Examples a second are the median over the logged stretches of all seeds. ""
  if no run has ended.

  Source: TransJect, table 3.
  """
  lines = []
  for group in groups:
    ended = [run for run in group.runs if run.results]
    if not ended:
      continue
    rates = [
      record["examples_per_second"]
      for run in ended
      for record in run.metrics
      if "examples_per_second" in record
    ]
    # Sizes and hardware are those of the first seed.
    results = ended[0].results
    hardware = results.get("hardware", {})
    count, kind = (hardware.get(k, "?") for k in ("devices", "device_kind"))
    sizes = (f"{results['parameters']:,}", f"{results['parameter_ratio']:.2f}")
    speed = f"{statistics.median(rates):.4g}" if rates else ""
    lines.append((group.label, *sizes, speed, f"{count} {kind}"))
  return markdown_table(SPEED_COLUMNS, lines) if lines else ""


def depth_against_width(groups: Sequence[SeedGroup]) -> Figure | None:
  """Returns losses over parameters for each depth of language models.

  None if there are no language models of two depths.

  Source: Levine et al. 2020, figure 2.
  """
  results = [
    run.results
    for group in groups
    for run in group.runs
    if run.results.get("metric") == "perplexity"
  ]
  # One depth alone has nothing to be compared with.
  if len({r["config"]["model"]["num_layers"] for r in results}) < 2:
    return None
  return depth.figure(depth.select_points(results))
