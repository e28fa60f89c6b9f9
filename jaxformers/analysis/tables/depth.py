"""Depth compared with width at equal parameters, from the runs of a sweep.

Source: figure 2 of Levine et al. 2020, https://arxiv.org/abs/2006.12467.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import scipy.stats

from jaxformers import config as configs
from jaxformers.analysis.plotting import figures
from jaxformers.analysis.tables.results import Result
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table, plus_minus, spread

# Numbers of parameters that differ by a smaller share are called equal.
SAME_SIZE = 0.1

# Fields that may differ between runs that are compared: sizes, the rate, and
# what changes no number.
COMPARABLE_FIELDS = (
  *configs.RESUMABLE_FIELDS,
  "seed",
  "log_steps",
  "checkpoint_steps",
  "model.num_layers",
  "model.d_model",
  "model.block.mlp_dim",
  "model.embedding",
  "reference.",
  "schedule.learning_rate",
)

Seeds = Mapping[int, Result]


class Point(NamedTuple):
  """Test loss of one depth and width over seeds.

  Attributes:
    num_layers: depth L.
    d_model: width d.
    rate: peak learning rate.
    losses: test loss of each seed, in nats per token.
    tokens: number of tokens that were trained on.
    epochs: number of times that these are the training text.
    better: a rate that scored better on fewer seeds; 0 if there is none.
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
    """Number of parameters besides the embedding, 12 L d^2."""
    return 12 * self.num_layers * self.d_model**2

  @property
  def mean(self) -> float:
    """Mean loss over the seeds."""
    return spread(self.losses.values())[0]

  @property
  def deviation(self) -> float:
    """Sample deviation of the loss over seeds; NaN for one seed."""
    return spread(self.losses.values())[1]


def _check_comparable(runs: Sequence[Result]) -> None:
  """Raises UserError if runs differ in more than sizes and learning rate."""
  values = collections.defaultdict(set)
  for run in runs:
    if run.get("metric") != "perplexity":
      raise UserError(
        f"A run of {run['task']} has no loss per token: give language models."
      )
    # Compare configs field by field, and the data by their digests.
    task = run["task_description"].items()
    fields = configs.flatten(run["config"])
    fields |= {f"data of {key}": value for key, value in task}
    for key, value in fields.items():
      if not key.startswith(COMPARABLE_FIELDS):
        values[key].add(json.dumps(value, sort_keys=True))
  differing = [
    f"\n  {key}: {', '.join(sorted(texts))}"
    for key, texts in values.items()
    if len(texts) > 1
  ]
  if differing:
    raise UserError(
      "These runs cannot be compared: choose runs that agree in"
      + "".join(differing)
    )


def select_points(runs: Iterable[Result]) -> list[Point]:
  """Returns a point for every depth and width, at its tuned learning rate.

  Args:
    runs: contents of `results.json` of language models.

  Returns:
    Points in the order of depth and width.

  Raises:
    UserError: for other runs, or for runs that differ in more than sizes, seed
      and learning rate.
  """
  runs = list(runs)
  _check_comparable(runs)
  # Group runs by shape, learning rate and seed.
  grid: dict[tuple[int, int], dict[float, dict[int, Result]]] = {}
  for run in runs:
    model = run["config"]["model"]
    shape = (model["num_layers"], model["d_model"])
    rate = run["config"]["schedule"]["learning_rate"]
    grid.setdefault(shape, {}).setdefault(rate, {})[run["seed"]] = run
  return [_select_point(*shape, rates) for shape, rates in sorted(grid.items())]


def _select_point(
  num_layers: int, d_model: int, rates: Mapping[float, Seeds]
) -> Point:
  """Returns the point of a shape with the most seeds, then the best score."""
  # Python compares (number of seeds, mean score) from the left.
  rate, best = max(
    rates.items(),
    key=lambda item: (
      len(item[1]),
      statistics.mean(run["selection_score"] for run in item[1].values()),
    ),
  )
  # Note rates that scored better on the seeds that they share with it.
  better = [other for other in rates if _scores_above(rates[other], best)]
  # All runs of a point saw the same data.
  first = next(iter(best.values()))
  config, description = first["config"], first["task_description"]
  # Tokens of all steps, and how often they are the text.
  length = config["task"]["max_len"]
  tokens = config["total_steps"] * config["batch_size"] * length
  epochs = tokens / (description["examples"]["train"] * length)
  losses = {seed: run["loss"] for seed, run in best.items()}
  other = better[0] if better else 0.0
  return Point(num_layers, d_model, rate, losses, tokens, epochs, other)


def _scores_above(seeds: Seeds, best: Seeds) -> bool:
  """True if runs scored better than the best ones on the seeds of both."""
  gaps = [
    seeds[seed]["selection_score"] - best[seed]["selection_score"]
    for seed in seeds.keys() & best.keys()
  ]
  # Without a shared seed the sum is 0, and the rate is not called better.
  return sum(gaps) > 0


class Pair(NamedTuple):
  """A deeper and a shallower network with as many parameters.

  Attributes:
    shallow: point of the network with fewer layers.
    deep: point of the network with more layers.
    gain: loss of `shallow` less that of `deep`; above 0 depth is better.
    error: standard error of the gain; NaN if either has one seed.
    margin: half the 95 % interval of the gain, by Welch's t; NaN with `error`.
  """

  shallow: Point
  deep: Point
  gain: float
  error: float
  margin: float

  @property
  def verdict(self) -> str:
    """Conclusion that the seeds allow at 95 %, of this pair alone."""
    if math.isnan(self.error):
      return "one seed: no verdict"
    if abs(self.gain) <= self.margin:
      return "not told apart"
    return "deeper is better" if self.gain > 0 else "wider is better"


def pairs(points: Sequence[Point]) -> list[Pair]:
  """Returns the pairs of nearly equal parameters and different depth.

  They are in the order of their size, and then of their depths.
  """
  ordered = list(itertools.chain(*_by_size(points)))
  deeper = sorted(points, key=lambda point: point.num_layers)
  return [
    Pair(shallow, deep, shallow.mean - deep.mean, *_welch(shallow, deep))
    for shallow, deep in itertools.product(ordered, deeper)
    # For sizes that are nearly equal this is the share that they differ by.
    if abs(math.log(shallow.parameters / deep.parameters)) < SAME_SIZE
    and shallow.num_layers < deep.num_layers
  ]


def _welch(*points: Point) -> tuple[float, float]:
  """Returns the standard error of a difference of means, and the margin.

  Source: Welch 1947; the margin is half the 95 % interval.
  """
  error = math.sqrt(sum(p.deviation**2 / len(p.losses) for p in points))
  if not error > 0:  # One seed, or seeds that do not differ.
    return error, error
  losses = (list(p.losses.values()) for p in points)
  welch = scipy.stats.ttest_ind(*losses, equal_var=False)
  return error, float(scipy.stats.t.ppf(0.975, welch.df)) * error


def _by_size(points: Sequence[Point]) -> list[list[Point]]:
  """Groups points of nearly equal parameters, the smallest first."""
  sizes: list[list[Point]] = []
  for point in sorted(points, key=lambda p: p.parameters):
    # A group reaches to `SAME_SIZE` above its smallest point.
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
  """Returns the points and their pairs as two tables in Markdown."""
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
    "better on the selection split, on the seeds that it has."
    for p in points
    if p.better
  ]
  # Compare the pairs of equal size and different depth.
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
    # Lines are shifted, so that bars at equal parameters can be told apart.
    shift = 1 + 0.012 * (number - (len(lines) - 1) / 2)
    shifted = points._replace(x=[count * shift for count in points.x])
    figures.draw_error_bars(axes, shifted, number, label)
  axes.set_xscale("log")
  axes.set_xticks(ticks, [f"{count / 1e6:.2g} M" for count in ticks])
  axes.minorticks_off()
  axes.set_xlabel("parameters without embedding, 12 L d²")
  axes.set_ylabel("test loss, nats per token")
  figures.draw_legend(fig, axes)


def figure(points: Sequence[Point], name: str = "depth") -> figures.Figure:
  """Returns the loss over parameters, a line for each depth.

  Args:
    points: result of `select_points`.
    name: name of the figure's files.
  """
  rows = [
    (f"{p.num_layers} layers", seed, p.d_model, p.rate, p.parameters, loss)
    for p in points
    for seed, loss in sorted(p.losses.items())
  ]
  # Ticks stand at the smallest network of each size.
  ticks = [size[0].parameters for size in _by_size(points)]
  seeds = sorted({len(p.losses) for p in points})
  return figures.Figure(
    name,
    "Depth against width",
    "Test loss of decoders of several depths over 12 L d^2, at the learning "
    "rate tuned on the selection split; bars are one deviation over "
    f"{' or '.join(map(str, seeds))} seeds, {points[0].tokens:,} tokens "
    f"trained on, {points[0].epochs:.2g} epochs (Levine et al. 2020, figure "
    "2).",
    ("depth", "seed", "d", "learning rate", "12 L d^2", "test loss, nats"),
    rows,
    functools.partial(_paint, ticks),
    (6, 4),
  )
