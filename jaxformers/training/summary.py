"""Results of a run: the content of `results.json`, and its table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxformers import models, workdirs
from jaxformers.tables import format_score
from jaxformers.training import origin, provenance
from jaxformers.training.checkpoint import Restored
from jaxformers.training.progress import duration
from jaxformers.training.run import Run

UNITS = {"perplexity": "tokens", "error": "tokens", "mean_iou": "images"}


def format_scores(means: Mapping[str, Any], metric: str) -> str:
  """Returns loss and metric on one line."""
  score = format_score(metric, means[metric])
  return f"loss {means['loss']:.4f}  {metric.replace('_', ' ')} {score}"


def describe_results(
  run: Run,
  scores: Mapping[str, Any],
  best: Restored,
  *,
  train_seconds: float,
  wall_seconds: float,
) -> dict[str, Any]:
  """Returns the content of `results.json`.

  Args:
    run: run that was scored.
    scores: scores on the test split.
    best: checkpoint that was scored.
    train_seconds, wall_seconds: times of all successive starts of the run.
  """
  config, task = run.config, run.task
  num_params = models.size(run.model)
  record = origin.read_record(run.workdir) if config["pretrained"] else None
  return {
    "task": task.name,
    "protocol": task.protocol,
    "selection": run.selection,
    "model": config["model"]["name"],
    "seed": config["seed"],
    "metric": run.objective.metric,
    **{key: value for key, value in scores.items() if key != "count"},
    "examples": scores["count"],
    "best_step": best.step,
    "selection_score": best.score,
    **({} if best.lost is None else {"damaged_best_step": best.lost}),
    **({} if record is None else {"pretrained": record}),
    "baselines": task.baselines(),
    "parameters": num_params,
    "parameter_ratio": num_params / run.num_reference_params,
    "metrics_records": len(workdirs.read_metrics(run.workdir)[0]),
    "train_seconds": train_seconds,
    "wall_seconds": wall_seconds,
    "commit": provenance.commit(),
    "hardware": provenance.hardware(),
    "versions": provenance.versions(),
    "data": dict(task.info),
    "task_description": task.description(),
    "max_len": task.max_len,
    "config": config,
  }


def table(results: Mapping[str, Any]) -> str:
  """Returns the numbers of a run as a table for people.

  Args:
    results: content of `results.json`.
  """
  task, protocol, seed = (results[k] for k in ("task", "protocol", "seed"))
  rows = list(_rows(results))
  width = max(len(name) for name, _ in rows)
  lines = [f"  {name:<{width}}  {value:>12}" for name, value in rows]
  return "\n".join([f"{task}, protocol {protocol}, seed {seed}", *lines])


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the name and the value of every row of the table."""
  metric = results.get("metric", "accuracy")
  # Scores, beside those of baselines.
  for name in (metric, "accuracy_top5"):
    if name in results:
      title = f"{results['model']} test {name.replace('_', ' ')}"
      yield title, format_score(name, results[name])
  for name, value in results["baselines"].items():
    yield name, format_score(metric, value)
  yield f"{UNITS.get(metric, 'examples')} scored", f"{results['examples']:,}"
  # Selection of the checkpoint, size and times.
  best = f"{results['best_step']}, {results['selection']}"
  yield "best step, chosen on", best
  if "damaged_best_step" in results:
    yield "damaged best step", f"{results['damaged_best_step']}"
  yield "parameters", f"{results['parameters']:,}"
  ratio = f"{results['parameter_ratio']:.2f} times"
  yield "relative to the Transformer", ratio
  yield "training time", duration(results["train_seconds"])
  yield "wall time", duration(results["wall_seconds"])
  if "pretrained" in results:
    yield "pretrained", results["pretrained"]["folder"]
  # Note if the data differ from those that the authors published.
  data = results["data"]
  if not data.get("authors_counts", True):
    counts = [f"{count:,} {name}" for name, count in data["counts"].items()]
    yield "data", f"not the authors' counts: {', '.join(counts)}"
  elif (is_authors := data.get("authors_checksum", True)) is not True:
    what = "not the authors' archive"
    if is_authors is None:
      what = "an archive without a published checksum"
    yield "data", f"{what}: SHA-256 {data['sha256'][:12]}..."
