r"""Mean and deviation over seeds of many runs, as one table.

python -m jaxformers results runs/*
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers import config as configs
from jaxformers import workdirs
from jaxformers.errors import UserError

COLUMNS = (
  "task",
  "protocol",
  "model",
  "config",
  "score",
  "seeds",
  "parameters",
  "x Transformer",
  "trivial",
  "chosen on",
  "train s",
)

# Of which less is better. What a metric is called in a table; shares are in
# percent.
LOWER = ("perplexity",)
TITLES = {
  "accuracy": "accuracy %",
  "mean_iou": "mean IoU %",
  "perplexity": "perplexity",
}


def files(folder: Path, name: str) -> list[Path]:
  """The files of a name in a folder and below, but for those of checkpoints."""
  return sorted(
    path
    for path in folder.rglob(name)
    if "checkpoints" not in path.relative_to(folder).parts
  )


def read(folders: Iterable[Path]) -> list[dict[str, Any]]:
  """Returns the `results.json` in each folder and below.

  What cannot be read is left out, and named on stderr with the reason.

  Raises:
    UserError: if nothing is left; names every reason.
  """
  results, problems = [], []
  for folder in folders:
    paths = files(folder, "results.json")
    if not paths:
      problems.append(
        f"There is no results.json in {folder} or below it: give the workdirs "
        "of finished runs. The training command finishes one."
      )
    for path in paths:
      try:
        content = workdirs.read_results(path.parent)
      except ValueError as error:
        problems.append(str(error))
        continue
      results.append(content)
      if "damaged_best_step" in content:
        print(f"Note: {path}: {describe_damage(content)}", file=sys.stderr)
  if not results:
    raise UserError("\n".join(problems))
  for problem in problems:
    print(f"Left out: {problem}", file=sys.stderr)
  return results


def describe_damage(result: Mapping[str, Any]) -> str:
  """Returns the sentence about results whose best checkpoint was damaged."""
  return (
    f"its best checkpoint, of step {result['damaged_best_step']}, was damaged; "
    f"that of step {result['best_step']} was scored."
  )


def recipe(result: Mapping[str, Any]) -> str:
  """All of a config that must agree for runs to be seeds of one another."""
  flat = configs.flatten(result["config"])
  left_out = (*configs.RESUMABLE_FIELDS, "seed")
  kept = {k: v for k, v in flat.items() if k not in left_out}
  of = result.get("task_description")
  return json.dumps([kept, of], sort_keys=True)


def spread(values: Collection[float]) -> tuple[float, float]:
  """Mean and sample deviation, which is NaN for one value."""
  if len(values) < 2:
    return statistics.mean(values), math.nan
  return statistics.mean(values), statistics.stdev(values)


def plus_minus(
  mean: float, deviation: float, digits: int = 2, sign: str = "+-"
) -> str:
  """ "1.23 +- 0.45", or the mean alone where there is no deviation."""
  if math.isnan(deviation):
    return f"{mean:.{digits}f}"
  return f"{mean:.{digits}f} {sign} {deviation:.{digits}f}"


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """One row for every recipe, over its seeds.

  Args:
    results: contents of `results.json`. Runs that differ in anything but the
      seed stand in rows of their own; a seed that occurs twice counts once.

  Returns:
    Rows of the fields of `COLUMNS` and `metric`; the score is (mean,
    deviation), in percent but for perplexities, the sample standard deviation,
    NaN for one seed.
  """
  groups: dict[str, dict[int, Mapping[str, Any]]] = {}
  for result in results:
    groups.setdefault(recipe(result), {})[result["seed"]] = result
  rows = []
  for seeds in groups.values():
    runs = list(seeds.values())
    one = runs[0]
    metric = one.get("metric", "accuracy")
    scale = 1 if metric in LOWER else 100
    scores = [scale * run[metric] for run in runs]
    model = one["config"]["model"]
    rows.append(
      {
        "task": one["task"],
        "protocol": protocol(one),
        "model": one["model"],
        "config": f"L={model['num_layers']} d={model['d_model']}",
        "metric": metric,
        "score": spread(scores),
        "seeds": " ".join(str(seed) for seed in sorted(seeds)),
        "parameters": one["parameters"],
        "x Transformer": one["parameter_ratio"],
        "trivial": {k: scale * v for k, v in one["baselines"].items()},
        "chosen on": one["selection"],
        "train s": statistics.mean(run["train_seconds"] for run in runs),
      }
    )
  return sorted(rows, key=lambda row: (row["task"], row["model"]))


def protocol(result: Mapping[str, Any]) -> str:
  """Protocol and length, and whether the data are not the authors' own."""
  own = result["data"].get("authors_checksum", True)
  length = f", {result['max_len']} long" if result["max_len"] else ""
  return result["protocol"] + length + ("" if own else ", another archive")


def _cell(column: str, value: Any) -> str:
  if column == "score":
    return plus_minus(*value)
  if column == "trivial":
    return ", ".join(f"{name} {score:.1f}" for name, score in value.items())
  if column == "parameters":
    return f"{value:,}"
  if column == "x Transformer":
    return f"{value:.2f}"
  return f"{value:.0f}" if column == "train s" else str(value)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """The rows as Markdown, a table for each metric."""
  tables = []
  for metric in dict.fromkeys(row["metric"] for row in rows):
    title = TITLES[metric]
    trivial = "trivial %" if title.endswith("%") else "trivial"
    heads = {"score": title, "trivial": trivial}
    lines = [[heads.get(name, name) for name in COLUMNS]]
    lines.append(["---"] * len(COLUMNS))
    lines += [
      [_cell(name, row[name]) for name in COLUMNS]
      for row in rows
      if row["metric"] == metric
    ]
    tables.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
  return "\n\n".join(tables)


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; a mistake ends in one message."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR")
  args = parser.parse_args(argv)
  try:
    print(markdown(summarise(read(args.workdirs))))
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  main()
