r"""Depth against width at equal parameters, from the runs of a sweep.

python -m jaxformers.analysis.depth runs/figure2 --out figure2

Of every depth and width the learning rate that was run with the most seeds
counts, and of several the one with the best loss on the selection split. The
table and the picture have the test loss over 12 L d^2, the parameters beside
the embedding, as in figure 2 of Levine et al. 2020
(https://arxiv.org/abs/2006.12467).
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

from jaxformers.analysis import results

ALIKE = 0.1  # Numbers of parameters that differ by less are called equal.


@dataclasses.dataclass(frozen=True)
class Point:
  """What one depth and width reached.

  Attributes:
    num_layers, d_model: L and d.
    rate: the peak learning rate.
    losses: on test, by seed, in nats a token.
    tokens: that were trained on.
  """

  num_layers: int
  d_model: int
  rate: float
  losses: Mapping[int, float]
  tokens: int

  @property
  def parameters(self) -> int:
    """12 L d^2."""
    return 12 * self.num_layers * self.d_model**2

  @property
  def mean(self) -> float:
    """Over the seeds."""
    return statistics.mean(self.losses.values())

  @property
  def deviation(self) -> float:
    """Of a sample; NaN for one seed."""
    if len(self.losses) < 2:
      return math.nan
    return statistics.stdev(self.losses.values())


def read(folders: Iterable[Path]) -> list[dict[str, Any]]:
  """Every `results.json` below the folders.

  Raises:
    ValueError: for a folder that has none, naming it.
  """
  found = []
  for folder in folders:
    paths = sorted(folder.rglob("results.json"))
    if not paths:
      raise ValueError(
        f"There is no results.json below {folder}: give the workdir of a sweep "
        "of configs/depth/figure2.py."
      )
    found += [json.loads(path.read_text(encoding="utf-8")) for path in paths]
  return found


def points(runs: Iterable[Mapping[str, Any]]) -> list[Point]:
  """One of every depth and width, in the order of depth and parameters.

  Args:
    runs: contents of `results.json`, of language models.

  Raises:
    ValueError: for other runs, or for runs that cannot be compared: of several
      vocabularies, lengths of windows, or numbers of tokens.
  """
  groups: dict[tuple[int, int], dict[str, list[Mapping[str, Any]]]] = {}
  for run in runs:
    if run.get("metric") != "perplexity":
      raise ValueError(
        f"A run of {run['task']} has no loss a token: give language models."
      )
    model = run["config"]["model"]
    shape = (model["num_layers"], model["d_model"])
    same = groups.setdefault(shape, {}).setdefault(results.recipe(run), [])
    if run["seed"] not in [one["seed"] for one in same]:
      same.append(run)
  found = []
  kinds = set()
  for (depth, width), recipes in sorted(groups.items()):

    def rank(runs: list[Mapping[str, Any]]) -> tuple[int, float]:
      scores = [one["selection_score"] for one in runs]
      return len(runs), statistics.mean(scores)

    best = max(recipes.values(), key=rank)
    config, about = best[0]["config"], best[0]["task_description"]
    tokens = (
      config["total_steps"] * config["batch_size"] * config["task"]["max_len"]
    )
    kinds.add((about["vocabulary_sha256"], config["task"]["max_len"], tokens))
    losses = {one["seed"]: one["loss"] for one in best}
    rate = config["schedule"]["learning_rate"]
    found.append(Point(depth, width, rate, losses, tokens))
  if len(kinds) > 1:
    listed = "; ".join(
      f"vocabulary {name[:8]}, windows of {length}, {tokens:,} tokens"
      for name, length, tokens in sorted(kinds)
    )
    raise ValueError(f"These runs cannot be compared: {listed}.")
  return found


@dataclasses.dataclass(frozen=True)
class Pair:
  """A deeper and a shallower network of as many parameters.

  Attributes:
    shallow, deep: the two.
    gain: the loss of the shallow one less that of the deep one; above 0 depth
      is better.
    error: the standard error of the gain; NaN if either has one seed.
  """

  shallow: Point
  deep: Point
  gain: float
  error: float

  @property
  def verdict(self) -> str:
    """What the seeds allow to say, at two standard errors."""
    if math.isnan(self.error):
      return "one seed: no verdict"
    if abs(self.gain) <= 2 * self.error:
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
    variances = [p.deviation**2 / len(p.losses) for p in (shallow, deep)]
    error = math.sqrt(sum(variances))
    made.append(Pair(shallow, deep, shallow.mean - deep.mean, error))
  return sorted(made, key=lambda pair: pair.shallow.parameters)


def _spread(value: float, spread: float, digits: int = 4) -> str:
  if math.isnan(spread):
    return f"{value:.{digits}f}"
  return f"{value:.{digits}f} +- {spread:.{digits}f}"


def _size(point: Point) -> tuple[int, int]:
  return round(point.parameters, -5), point.num_layers


def markdown(found: Sequence[Point]) -> str:
  """The points and their pairs as two tables in Markdown."""
  lines = [
    "| parameters, M | L | d | learning rate | seeds | test loss, nats |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  lines += [
    f"| {p.parameters / 1e6:.2f} | {p.num_layers} | {p.d_model} | {p.rate:g} | "
    f"{' '.join(str(seed) for seed in sorted(p.losses))} | "
    f"{_spread(p.mean, p.deviation)} |"
    for p in sorted(found, key=_size)
  ]
  made = pairs(found)
  if made:
    lines += [
      "",
      "| parameters, M | L against L | gain of depth, nats | |",
      "| --- | --- | --- | --- |",
    ]
    lines += [
      f"| {pair.shallow.parameters / 1e6:.2f} | {pair.shallow.num_layers}, "
      f"{pair.deep.num_layers} | {_spread(pair.gain, pair.error)} | "
      f"{pair.verdict} |"
      for pair in made
    ]
  return "\n".join(lines)


def draw(path: Path, found: Sequence[Point]) -> None:
  """Draws loss over parameters, a line for each depth; bars are deviations.

  Args:
    path: of the picture; its suffix says the format.
    found: of `points`.
  """
  from matplotlib.figure import Figure

  figure = Figure(figsize=(6, 4.2), layout="constrained")
  axes = figure.subplots()
  depths = sorted({point.num_layers for point in found})
  for number, depth in enumerate(depths):
    line = [point for point in found if point.num_layers == depth]
    # Beside one another, so that bars at equal parameters can be told apart.
    shift = 1 + 0.012 * (number - (len(depths) - 1) / 2)
    axes.errorbar(
      [point.parameters * shift for point in line],
      [point.mean for point in line],
      [0 if math.isnan(p.deviation) else p.deviation for p in line],
      marker="o",
      markersize=4,
      capsize=3,
      label=f"{depth} layers",
    )
  sizes = sorted({float(f"{point.parameters:.1e}") for point in found})
  axes.set_xscale("log")
  axes.set_xticks(sizes, [f"{size / 1e6:g} M" for size in sizes])
  axes.minorticks_off()
  axes.set_xlabel("parameters without embedding, 12 L d²")
  axes.set_ylabel("test loss, nats a token")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the tables, and draws if asked; a mistake ends in one message."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxformers.analysis.depth",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR")
  parser.add_argument("--out", default="", help="OUT.png and OUT.svg")
  args = parser.parse_args(argv)
  try:
    found = points(read(args.workdirs))
    print(markdown(found))
  except ValueError as error:
    sys.exit(f"error: {error}")
  if args.out:
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
      draw(out.with_suffix(suffix), found)
    print(f"Written to {out}.png and .svg.")


if __name__ == "__main__":
  main()
