r"""Depth against width at equal parameters, from the runs of a sweep.

python -m jaxformers depth runs/figure2 --out figure2

Of every depth and width the learning rate that was run with the most seeds
counts, and of several the one with the best loss on the selection split; runs
that differ in anything else are refused. Whether seeds tell two depths apart is
said by Welch's t at 95 %, of each pair alone: among twenty pairs of equals one
will seem to differ. The table and the picture have the test loss over
12 L d^2, the parameters beside the embedding, as in figure 2 of Levine et al.
2020 (https://arxiv.org/abs/2006.12467).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from jaxformers import config as configs
from jaxformers.analysis.plotting.figures import (
  Figure,
  averaged,
  error_bars,
  grouped,
  legend,
)
from jaxformers.analysis.tables.results import plus_minus, read, spread
from jaxformers.errors import UserError

ALIKE = 0.1  # Numbers of parameters that differ by less are called equal.


@dataclasses.dataclass(frozen=True)
class Point:
  """What one depth and width reached.

  Attributes:
    num_layers, d_model: L and d.
    rate: the peak learning rate.
    losses: on test, by seed, in nats a token.
    tokens: that were trained on.
    epochs: how often that is all of the text.
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
    """12 L d^2."""
    return 12 * self.num_layers * self.d_model**2

  @property
  def mean(self) -> float:
    """Over the seeds."""
    return spread(self.losses.values())[0]

  @property
  def deviation(self) -> float:
    """Of a sample; NaN for one seed."""
    return spread(self.losses.values())[1]


# What may differ between runs that are compared: sizes, the rate, and what
# changes no number.
FREE = (
  *configs.RESUMABLE_FIELDS,
  "seed",
  "model.num_layers",
  "model.d_model",
  "model.block.mlp_dim",
  "model.embedding.",
  "reference.",
  "schedule.learning_rate",
  "log_steps",
  "checkpoint_steps",
)


def _check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
  """Raises UserError if runs differ in more than sizes and learning rate."""
  values: dict[str, set[str]] = {}
  for run in runs:
    if run.get("metric") != "perplexity":
      raise UserError(
        f"A run of {run['task']} has no loss a token: give language models."
      )
    of = run["task_description"]
    told = configs.flatten(run["config"]) | {
      f"data of {k}": v for k, v in of.items()
    }
    for key, value in told.items():
      if not key.startswith(FREE):
        values.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
  differing = {k: v for k, v in values.items() if len(v) > 1}
  if differing:
    listed = "\n  ".join(
      f"{key}: {', '.join(sorted(found))}" for key, found in differing.items()
    )
    raise UserError(
      f"These runs cannot be compared, they differ in\n  {listed}"
    )


def points(runs: Iterable[Mapping[str, Any]]) -> list[Point]:
  """One of every depth and width, in the order of depth and parameters.

  Args:
    runs: contents of `results.json`, of language models.

  Raises:
    UserError: for other runs, or for runs that differ in more than sizes, seed
      and learning rate.
  """
  runs = list(runs)
  _check_alike(runs)
  groups: dict[tuple[int, int], dict[float, dict[int, Any]]] = {}
  for run in runs:
    model = run["config"]["model"]
    shape = (model["num_layers"], model["d_model"])
    rate = run["config"]["schedule"]["learning_rate"]
    groups.setdefault(shape, {}).setdefault(rate, {})[run["seed"]] = run
  found = []
  for (depth, width), rates in sorted(groups.items()):

    def score(rate: float, rates: Any = rates) -> float:
      own = rates[rate].values()
      return statistics.mean(one["selection_score"] for one in own)

    most = max(len(own) for own in rates.values())
    rate = max((r for r in rates if len(rates[r]) == most), key=score)
    best = rates[rate]

    def above(other: float, best: Any = best, rates: Any = rates) -> bool:
      """Whether a rate scored better on the seeds that both have."""
      own = rates[other]
      both = own.keys() & best.keys()
      gaps = [
        own[k]["selection_score"] - best[k]["selection_score"] for k in both
      ]
      return sum(gaps) > 0

    better = next((other for other in rates if above(other)), 0.0)
    one = next(iter(best.values()))
    config = one["config"]
    tokens = (
      config["total_steps"] * config["batch_size"] * config["task"]["max_len"]
    )
    there = one["task_description"]["examples"]["train"]
    found.append(
      Point(
        depth,
        width,
        rate,
        {seed: own["loss"] for seed, own in best.items()},
        tokens,
        tokens / (there * config["task"]["max_len"]),
        better,
      )
    )
  return found


@dataclasses.dataclass(frozen=True)
class Pair:
  """A deeper and a shallower network of as many parameters.

  Attributes:
    shallow, deep: the two.
    gain: the loss of the shallow one less that of the deep one; above 0 depth
      is better.
    error: the standard error of the gain; NaN if either has one seed.
    margin: half the 95 % interval of the gain, by Welch's t; NaN with it.
  """

  shallow: Point
  deep: Point
  gain: float
  error: float
  margin: float

  @property
  def verdict(self) -> str:
    """What the seeds allow to say at 95 %, of this pair alone."""
    if math.isnan(self.error):
      return "one seed: no verdict"
    if abs(self.gain) <= self.margin:
      return "not told apart"
    return "deeper is better" if self.gain > 0 else "wider is better"


def pairs(found: Sequence[Point]) -> list[Pair]:
  """All of nearly equal parameters and different depth."""
  made = []
  for one, other in itertools.combinations(found, 2):
    alike = abs(math.log(one.parameters / other.parameters)) < ALIKE
    if one.num_layers == other.num_layers or not alike:
      continue
    shallow, deep = sorted((one, other), key=lambda point: point.num_layers)
    error, margin = _welch(shallow, deep)
    made.append(Pair(shallow, deep, shallow.mean - deep.mean, error, margin))
  ranks = {id(p): k for k, own in enumerate(_by_size(found)) for p in own}
  return sorted(
    made,
    key=lambda pair: (
      ranks[id(pair.shallow)],
      pair.shallow.num_layers,
      pair.deep.num_layers,
    ),
  )


def _welch(one: Point, other: Point) -> tuple[float, float]:
  """The standard error of a difference of means, and half its 95 % interval."""
  parts = [p.deviation**2 / len(p.losses) for p in (one, other)]
  if not sum(parts) > 0:  # One seed, or seeds that do not differ.
    return math.sqrt(sum(parts)), math.sqrt(sum(parts))
  freedom = sum(parts) ** 2 / sum(
    part**2 / (len(p.losses) - 1)
    for part, p in zip(parts, (one, other), strict=True)
  )
  error = math.sqrt(sum(parts))
  return error, float(scipy.stats.t.ppf(0.975, freedom)) * error


def _by_size(found: Sequence[Point]) -> list[list[Point]]:
  """Points of nearly equal parameters together, the smallest first."""
  sizes: list[list[Point]] = []
  for point in sorted(found, key=lambda p: p.parameters):
    near = sizes and point.parameters / sizes[-1][0].parameters < 1 + ALIKE
    if near:
      sizes[-1].append(point)
    else:
      sizes.append([point])
  return [sorted(own, key=lambda p: p.num_layers) for own in sizes]


def markdown(found: Sequence[Point]) -> str:
  """The points and their pairs as two tables in Markdown."""
  lines = [
    "| parameters, M | L | d | learning rate | seeds | test loss, nats |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  lines += [
    f"| {p.parameters / 1e6:.2f} | {p.num_layers} | {p.d_model} | {p.rate:g} | "
    f"{' '.join(str(seed) for seed in sorted(p.losses))} | "
    f"{plus_minus(p.mean, p.deviation, 4)} |"
    for own in _by_size(found)
    for p in own
  ]
  lines += ["", f"{found[0].tokens:,} tokens, {found[0].epochs:.2g} epochs."]
  lines += [
    f"L = {p.num_layers}, d = {p.d_model}: learning rate {p.better:g} scored "
    "better on the selection split, on the seeds that it has."
    for p in found
    if p.better
  ]
  made = pairs(found)
  if made:
    lines += [
      "",
      "| parameters, M | L against L | gain of depth, nats | 95 % of one pair |"
      " |",
      "| --- | --- | --- | --- | --- |",
    ]
    lines += [
      f"| {pair.shallow.parameters / 1e6:.2f} | {pair.shallow.num_layers}, "
      f"{pair.deep.num_layers} | {plus_minus(pair.gain, pair.error, 4)} | "
      f"+- {pair.margin:.4f} | {pair.verdict} |"
      for pair in made
    ]
  return "\n".join(lines)


def figure(found: Sequence[Point]) -> Figure:
  """Loss over parameters, a line for each depth; bars are deviations.

  Args:
    found: of `points`.
  """
  rows = [
    (f"{p.num_layers} layers", seed, p.d_model, p.rate, p.parameters, loss)
    for p in found
    for seed, loss in sorted(p.losses.items())
  ]

  def paint(canvas: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    axes = canvas.subplots()
    lines = grouped(rows)
    for number, (label, own) in enumerate(lines.items()):
      places, means, bars = averaged(own, 4, 5)
      # Beside one another, so that bars at equal parameters can be told apart.
      shift = 1 + 0.012 * (number - (len(lines) - 1) / 2)
      beside = [parameters * shift for parameters in places]
      error_bars(axes, beside, means, bars, number, label)
    sizes = [own[0].parameters for own in _by_size(found)]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size / 1e6:.2g} M" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("parameters without embedding, 12 L d²")
    axes.set_ylabel("test loss, nats a token")
    legend(canvas, axes)

  seeds = sorted({len(p.losses) for p in found})
  return Figure(
    "depth",
    "Depth against width",
    "Test loss of decoders of several depths over 12 L d^2, at the learning "
    "rate tuned on the selection split; bars are one deviation over "
    f"{' or '.join(str(n) for n in seeds)} seeds, "
    f"{found[0].tokens:,} tokens trained on, {found[0].epochs:.2g} epochs "
    "(Levine et al. 2020, figure 2).",
    ("depth", "seed", "d", "learning rate", "12 L d^2", "test loss, nats"),
    rows,
    paint,
    (6, 4),
  )


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the tables, and draws if asked; a mistake ends in one message."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxformers depth",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR")
  parser.add_argument("--out", default="", help="OUT.png, .svg and .csv")
  args = parser.parse_args(argv)
  try:
    found = points(read(args.workdirs))
    print(markdown(found))
    if args.out:
      out = Path(args.out)
      dataclasses.replace(figure(found), name=out.name).write(out.parent)
      print(f"Written to {out}.png, .svg and .csv.")
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  main()
