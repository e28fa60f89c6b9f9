"""Comparison of depth with width at equal parameters, from runs of a sweep.

Source: figure 2 of Levine et al. 2020, https://arxiv.org/abs/2006.12467.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import scipy.stats

from jaxformers import config as configs
from jaxformers import models
from jaxformers.analysis.plotting import figures
from jaxformers.analysis.tables import results
from jaxformers.analysis.tables.results import Result
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table, plus_minus, spread

# Relative difference below which numbers of parameters count as equal.
SAME_SIZE = 0.1

# Fields in which runs may differ and still be compared: sizes, learning rate,
# and fields that do not change the numbers. The share of the MLP, and the scale
# of the embedding at equal sizes, are compared apart.
COMPARABLE_FIELDS = (
  *results.FIELDS_OF_RUN,
  "log_steps",
  "checkpoint_steps",
  "model.num_layers",
  "model.d_model",
  "model.block.mlp_dim",
  "model.embedding.scale",
  "model.embedding.init_std",
  "reference.",
  "schedule.learning_rate",
)

Seeds = Mapping[int, Result]


class Point(NamedTuple):
  """Test losses of one depth and width.

  Attributes:
    num_layers: depth L.
    d_model: width d.
    rate: peak learning rate.
    losses: test loss by seed, in nats per token.
    tokens: number of training tokens of all steps.
    epochs: number of passes over the training text.
    better: a learning rate that scored better on fewer seeds; 0 if there is
      none.
  """

  num_layers: int
  d_model: int
  rate: float
  losses: Mapping[int, float]
  tokens: int
  epochs: float
  better: float

  @property
  def parameters(self) -> int:
    """Number of parameters without the embedding, 12 L d^2."""
    return 12 * self.num_layers * self.d_model**2

  @property
  def mean(self) -> float:
    """Mean loss over the seeds."""
    return spread(self.losses.values())[0]

  @property
  def deviation(self) -> float:
    """Sample deviation of the loss over seeds; NaN for one seed."""
    return spread(self.losses.values())[1]


def _compared(run: Result) -> dict[str, Any]:
  """Returns the fields in which runs must agree, and digests of the data.

  Options of the block that a run leaves out have their defaults.
  """
  config = models.resolve_defaults(run["config"])
  if variant := models.MODELS.data.get(config["model"].get("name")):
    options = dataclasses.fields(models.BLOCKS[variant.block])
    simple = (bool, int, float, str)
    block = {
      o.name: o.default for o in options if isinstance(o.default, simple)
    }
    block |= config["model"].get("block", {})
    config = {**config, "model": {**config["model"], "block": block}}
  flat = configs.flatten(config)
  # A section without options is empty, or missing.
  fields = {
    k: v
    for k, v in flat.items()
    if not k.startswith(COMPARABLE_FIELDS) and v != {}
  }
  if "model.block.mlp_dim" in flat:
    share = flat["model.block.mlp_dim"] / flat["model.d_model"]
    # Widths are rounded.
    fields["mlp_dim / d_model"] = round(share, 1)
  task = run["task_description"].items()
  return fields | {f"data of {key}": value for key, value in task}


def _check_comparable(runs: Sequence[Result]) -> None:
  """Raises UserError if runs differ in more than sizes and learning rate."""
  fields: list[dict[str, Any]] = []
  # Embeddings follow from the width: compare them at one depth and width.
  values: dict[str, set[str]] = {}
  for run in runs:
    if run.get("metric") != "perplexity":
      raise UserError(
        f"A run of {run['task']} has no loss per token. Give runs of language "
        "models."
      )
    fields.append(_compared(run))
    key = f"embedding of {results.describe_size(run)}"
    embedding = run["config"]["model"].get("embedding", {})
    values.setdefault(key, set()).add(json.dumps(embedding, sort_keys=True))
  # Compare configs field by field, also where a run leaves one at its default.
  for key in dict.fromkeys(key for of_run in fields for key in of_run):
    values[key] = {
      json.dumps(of_run[key], sort_keys=True) if key in of_run else "not set"
      for of_run in fields
    }
  # List the fields that differ, with their values.
  differing = [
    f"\n  {key}: {', '.join(sorted(texts))}"
    for key, texts in values.items()
    if len(texts) > 1
  ]
  if differing:
    raise UserError(
      "These runs cannot be compared. Choose runs that agree in"
      + "".join(differing)
    )


def select_points(runs: Iterable[Result]) -> list[Point]:
  """Returns a point for every depth and width, at the tuned learning rate.

  Args:
    runs: contents of `results.json` of language models.

  Returns:
    Points sorted by depth and width.

  Raises:
    UserError: if a run is not of a language model, if runs differ in more than
      sizes, seed and learning rate, or if two agree in all of these.
  """
  runs = list(runs)
  _check_comparable(runs)
  # Group runs by shape, learning rate and seed.
  grid: dict[tuple[int, int], dict[float, dict[int, Result]]] = {}
  for run in runs:
    model = run["config"]["model"]
    shape = (model["num_layers"], model["d_model"])
    rate = run["config"]["schedule"]["learning_rate"]
    seeds = grid.setdefault(shape, {}).setdefault(rate, {})
    if seeds.get(run["seed"], run) != run:
      raise UserError(
        f"Two runs have {results.describe_size(run)}, the learning rate "
        f"{rate:g} and the seed {run['seed']}: give one of them."
      )
    seeds[run["seed"]] = run
  return [_select_point(*shape, rates) for shape, rates in sorted(grid.items())]


def _select_point(
  num_layers: int, d_model: int, rates: Mapping[float, Seeds]
) -> Point:
  """Returns the point of one depth and width, at its best learning rate.

  The best learning rate has the most seeds, and among these the best mean
  selection score.

  Args:
    num_layers, d_model: depth and width.
    rates: runs by learning rate and seed.
  """
  # Choose the largest pair (number of seeds, mean score).
  rate, best = max(
    rates.items(),
    key=lambda item: (
      len(item[1]),
      statistics.mean(run["selection_score"] for run in item[1].values()),
    ),
  )
  # Note rates that scored better on the seeds shared with the best rate.
  better = [other for other in rates if _scores_above(rates[other], best)]
  # Take config and data from the first run, since all runs share them.
  first = next(iter(best.values()))
  config, description = first["config"], first["task_description"]
  # Count the tokens of all steps, and the passes over the text.
  length = config["task"]["max_len"]
  tokens = config["total_steps"] * config["batch_size"] * length
  epochs = tokens / (description["examples"]["train"] * length)
  losses = {seed: run["loss"] for seed, run in best.items()}
  other = better[0] if better else 0.0
  return Point(num_layers, d_model, rate, losses, tokens, epochs, other)


def _scores_above(seeds: Seeds, best: Seeds) -> bool:
  """Returns True if runs score better than the best ones on shared seeds."""
  gaps = [
    seeds[seed]["selection_score"] - best[seed]["selection_score"]
    for seed in seeds.keys() & best.keys()
  ]
  # The sum is 0 if no seed is shared, and the result is False.
  return sum(gaps) > 0


class Pair(NamedTuple):
  """Deeper and shallower network with equal numbers of parameters.

  Attributes:
    shallow: point of the network with fewer layers.
    deep: point of the network with more layers.
    gain: loss of `shallow` minus loss of `deep`. If the gain is positive, the
      deeper network is better.
    error: standard error of the gain; NaN if either network has one seed.
    margin: half the 95 % confidence interval of the gain, by Welch's t; NaN if
      `error` is.
  """

  shallow: Point
  deep: Point
  gain: float
  error: float
  margin: float

  @property
  def verdict(self) -> str:
    """Conclusion at the 95 % level, not corrected for several pairs."""
    if math.isnan(self.error):
      return "one seed: no verdict"
    if abs(self.gain) <= self.margin:
      return "no significant difference"
    return "deeper is better" if self.gain > 0 else "wider is better"


def pairs(points: Sequence[Point]) -> list[Pair]:
  """Returns the pairs of nearly equal parameters and different depth.

  The pairs are sorted by size, and then by depth.
  """
  ordered = list(itertools.chain(*_by_size(points)))
  deeper = sorted(points, key=lambda point: point.num_layers)
  return [
    Pair(shallow, deep, shallow.mean - deep.mean, *_welch(shallow, deep))
    for shallow, deep in itertools.product(ordered, deeper)
    # The log of the ratio is about the relative difference of the sizes.
    if abs(math.log(shallow.parameters / deep.parameters)) < SAME_SIZE
    and shallow.num_layers < deep.num_layers
  ]


def _welch(*points: Point) -> tuple[float, float]:
  """Returns standard error and margin of a difference of means.

  The margin is half the 95 % confidence interval.

  Source: Welch 1947.
  """
  error = math.sqrt(sum(p.deviation**2 / len(p.losses) for p in points))
  if not error > 0:  # One seed, or seeds that do not differ.
    return error, error
  # Multiply the standard error by the 97.5 % quantile of Student's t.
  losses = (list(p.losses.values()) for p in points)
  welch = scipy.stats.ttest_ind(*losses, equal_var=False)
  return error, float(scipy.stats.t.ppf(0.975, welch.df)) * error


def _by_size(points: Sequence[Point]) -> list[list[Point]]:
  """Returns groups of points of nearly equal parameters, smallest first."""
  sizes: list[list[Point]] = []
  for point in sorted(points, key=lambda p: p.parameters):
    # A group extends to `SAME_SIZE` above its smallest point.
    smallest = sizes[-1][0].parameters if sizes else 0
    if smallest and point.parameters / smallest < 1 + SAME_SIZE:
      sizes[-1].append(point)
    else:
      sizes.append([point])
  return [sorted(size, key=lambda p: p.num_layers) for size in sizes]


POINT_COLUMNS = (
  "parameters, M",
  "L",
  "d",
  "learning rate",
  "seeds",
  "test loss, nats",
)
PAIR_COLUMNS = (
  "parameters, M",
  "L against L",
  "gain of depth, nats",
  "95 % of one pair",
  "",
)


def markdown(points: Sequence[Point]) -> str:
  """Returns the points and their pairs as two Markdown tables."""
  # Write the table of points, and notes on their learning rates.
  lines = [
    (
      f"{p.parameters / 1e6:.2f}",
      p.num_layers,
      p.d_model,
      f"{p.rate:g}",
      " ".join(map(str, sorted(p.losses))),
      plus_minus(p.mean, p.deviation, 4),
    )
    for p in itertools.chain(*_by_size(points))
  ]
  text = [markdown_table(POINT_COLUMNS, lines)]
  text += ["", f"{points[0].tokens:,} tokens, {points[0].epochs:.2g} epochs."]
  text += [
    f"L = {p.num_layers}, d = {p.d_model}: learning rate {p.better:g} scored "
    "better on the selection split, on the seeds that were run with it."
    for p in points
    if p.better
  ]
  # Write the table of pairs of equal size and different depth.
  compared = [
    (
      f"{pair.shallow.parameters / 1e6:.2f}",
      f"{pair.shallow.num_layers}, {pair.deep.num_layers}",
      plus_minus(pair.gain, pair.error, 4),
      f"+- {pair.margin:.4f}",
      pair.verdict,
    )
    for pair in pairs(points)
  ]
  if compared:
    text += ["", markdown_table(PAIR_COLUMNS, compared)]
  return "\n".join(text)


def _paint(ticks: Sequence[float], fig: Any, rows: list[figures.Row]) -> None:
  """Draws a line for each depth over the number of parameters."""
  axes = fig.subplots()
  lines = figures.grouped(rows)
  for number, (label, line_rows) in enumerate(lines.items()):
    points = figures.averaged(line_rows, 4, 5)
    # Shift the lines, so that bars at equal parameters do not overlap.
    shift = 1 + 0.012 * (number - (len(lines) - 1) / 2)
    shifted = points._replace(x=[count * shift for count in points.x])
    figures.draw_error_bars(axes, shifted, number, label)
  # Label the axes, with ticks in millions of parameters.
  axes.set_xscale("log")
  axes.set_xticks(ticks, [f"{count / 1e6:.2g} M" for count in ticks])
  axes.minorticks_off()
  axes.set_xlabel("parameters without embedding, 12 L d²")
  axes.set_ylabel("test loss, nats per token")
  figures.draw_legend(fig, axes)


def figure(points: Sequence[Point], name: str = "depth") -> figures.Figure:
  """Returns the figure of losses over parameters, a line for each depth.

  Args:
    points: result of `select_points`.
    name: name of the figure's files.
  """
  rows = [
    (f"{p.num_layers} layers", seed, p.d_model, p.rate, p.parameters, loss)
    for p in points
    for seed, loss in sorted(p.losses.items())
  ]
  # Put a tick at the smallest network of each size.
  ticks = [size[0].parameters for size in _by_size(points)]
  seeds = sorted({len(p.losses) for p in points})
  return figures.Figure(
    name,
    "Depth against width",
    "Test loss of decoders of several depths over 12 L d^2, at the learning "
    "rate tuned on the selection split. Bars are one deviation over "
    f"{' or '.join(map(str, seeds))} seeds. Training: {points[0].tokens:,} "
    f"tokens, {points[0].epochs:.2g} epochs (Levine et al. 2020, figure 2).",
    ("depth", "seed", "d", "learning rate", "12 L d^2", "test loss, nats"),
    rows,
    functools.partial(_paint, ticks),
    (6, 4),
  )
