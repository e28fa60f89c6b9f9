"""What is drawn of runs without their models: curves, scores, speeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure
from jaxformers.analysis.tables import depth
from jaxformers.analysis.tables import results as tables
from jaxformers.analysis.tables.runs import SIZES, Group, One, by_size, seeds
from jaxformers.tables import markdown_table


def training(found: Sequence[Group]) -> Figure:
  """Loss, and the score on the selection split, over steps."""
  rows = []
  names: dict[str, str] = {}
  for group in found:
    for one in group.runs:
      for line in one.metrics():
        for key, value in line.items():
          split, slash, metric = key.partition("/")
          if not slash or value is None:
            continue
          unit = ", nats" if metric == "loss" else ""
          names[key] = f"{metric.replace('_', ' ')} on {split}{unit}"
          rows.append((group.label, one.seed, key, line["step"], value))
  wanted = sorted(names, key=lambda k: (not k.endswith("loss"), k))[:6]
  kept = [row for row in rows if row[2] in wanted]
  return plots.curves(
    "training",
    "Training curves",
    "Means over log_steps steps for train, over the whole split elsewhere; "
    f"bands are one deviation over seeds ({seeds(found)}). Of more than six "
    "quantities the first six are drawn.",
    kept,
    "step",
    {key: names[key] for key in wanted},
    markers=False,
  )


def sizes(found: Sequence[Group]) -> Figure | None:
  """Test score against depth, width and experts (TransJect, figure 3).

  None if no two runs of one model and task differ in them.
  """
  found = [group for group in found if any(one.results for one in group.runs)]
  metrics = [_score(one)[0] for g in found for one in g.runs if one.results]
  metric = max(metrics, key=metrics.count) if metrics else ""
  rows = [
    (line, one.seed, name, value, _score(one)[1])
    for line, name, value, group in by_size(found)
    for one in group.runs
    if one.results and _score(one)[0] == metric
  ]
  if not rows:
    return None
  return plots.against(
    "sizes",
    "Score against the size of the model",
    f"On test, mean and deviation over seeds ({seeds(found)}); along a line "
    "nothing else differs.",
    rows,
    SIZES,
    metric,
  )


def _score(one: One) -> tuple[str, float]:
  metric = one.results.get("metric", "accuracy")
  scale = 1 if metric in tables.LOWER else 100
  return tables.TITLES[metric], scale * one.results[metric]


def speeds(found: Sequence[Group]) -> str:
  """Parameters and speed of every line (TransJect, table 3), in Markdown.

  Examples a second are the median over the logged stretches of all seeds; ""
  if no run has ended.
  """
  lines = []
  for group in found:
    ended = [one for one in group.runs if one.results]
    logged = [
      line["examples_per_second"]
      for one in ended
      for line in one.metrics()
      if "examples_per_second" in line
    ]
    if not ended:
      continue
    r = ended[0].results
    hardware = r.get("hardware", {})
    where = f"{hardware.get('devices', '?')} {hardware.get('device_kind', '?')}"
    cells = (
      group.label,
      f"{r['parameters']:,}",
      f"{r['parameter_ratio']:.2f}",
      f"{statistics.median(logged):.4g}" if logged else "",
      where,
    )
    lines.append(cells)
  header = (
    "run",
    "parameters",
    "x Transformer",
    "examples/s in training",
    "on",
  )
  return markdown_table(header, lines) if lines else ""


def deep(found: Sequence[Group]) -> Figure | None:
  """Loss against parameters per depth (Levine et al. 2020, figure 2).

  None if there are no language models of two depths.
  """
  runs = [
    one.results
    for group in found
    for one in group.runs
    if one.results.get("metric") == "perplexity"
  ]
  if len({run["config"]["model"]["num_layers"] for run in runs}) < 2:
    return None
  return depth.figure(depth.points(runs))
