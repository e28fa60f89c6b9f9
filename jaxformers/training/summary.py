"""Results of a run: the content of `results.json`, and a table of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxformers import models
from jaxformers.foundations import workdirs
from jaxformers.foundations.tables import format_score
from jaxformers.models.mixer import names_with_step
from jaxformers.tasks import arrays
from jaxformers.training import origin, provenance
from jaxformers.training.checkpoint import Restored
from jaxformers.training.progress import duration
from jaxformers.training.run import Run

# Below this number of test examples, an interval of an accuracy is shown.
FEW_EXAMPLES = 1_000
UNITS = {
  "perplexity": "tokens",
  "error": "tokens",
  "mean_iou": "images",
  "f1": "questions",
  "spearman": "pairs",
}


def format_scores(means: Mapping[str, Any], metric: str) -> str:
  """Returns loss and metric as text; accuracy if the metric is missing."""
  metric = metric if metric in means else "accuracy"
  score = format_score(metric, means[metric])
  return f"loss {means['loss']:.4f}  {metric.replace('_', ' ')} {score}"


def split_title(task: str, selection: str) -> str:
  """Returns the name of the split that selects the checkpoint, for messages.

  If examples given in Python have no test split, the held-out examples select
  the checkpoint and are scored in the end, as if they were a test split.

  Args:
    task: name of the task.
    selection: name of the split, as in `Task.selection`.
  """
  is_held_out = task == arrays.NAME and selection.startswith("test")
  return "held-out" + selection[4:] if is_held_out else selection


def introduction(run: Run) -> Iterator[str]:
  """Yields lines that describe a run: its model, data, device and training."""
  config, task, hardware = run.config, run.task, provenance.hardware()
  # Compare the size of the model with the reference Transformer.
  num_params = models.size(run.model)
  ratio = num_params / run.num_reference_params
  yield (
    f"Model: {config.model.name}, {num_params:,} parameters, {ratio:.2f} "
    "times those of the Transformer."
  )
  # Count the examples of each split.
  names = ("train", "validation", "test")
  counts = ", ".join(f"{len(task.splits[n]):,} {n}" for n in names)
  yield f"Data: {task.name}, protocol {task.protocol}, {counts} examples."
  if task.curriculum:
    easier = ", ".join(task.curriculum)
    yield f"Curriculum: {config.short_steps:,} first steps read {easier}."
  # A CPU has no device kind: name its processor.
  is_cpu = hardware["platform"] == "cpu"
  kind = hardware["processor" if is_cpu else "device_kind"]
  yield (
    f"Device: {hardware['devices']} {hardware['platform'].upper()} ({kind}), "
    f"{config.model.dtype}."
  )
  # Describe the schedule.
  schedule = config.schedule
  rise = schedule.warmup_steps
  warmup = f", {rise:,} warm-up steps" if rise else ""
  yield (
    f"Training: {config.total_steps:,} steps of {config.batch_size:,} "
    f"examples, {config.optimizer.name}, learning rate "
    f"{schedule.options.get('learning_rate', '?')} ({schedule.name}{warmup}), "
    f"seed {config.seed}."
  )


def describe_results(
  run: Run,
  scores: Mapping[str, Any],
  best: Restored,
  baselines: Mapping[str, float],
  *,
  train_seconds: float,
  began: float,
) -> dict[str, Any]:
  """Returns the content of `results.json`.

  Args:
    run: run that was scored.
    scores: scores on the test split.
    best: checkpoint that was scored.
    baselines: scores of the trivial rules.
    train_seconds: training time of all processes of the run, one after the
      other.
    began: value of `time.perf_counter` from which the wall time is counted.
  """
  config, task = run.config, run.task
  num_params = models.size(run.model)
  trained = best.loop_state.get("commits", [])
  record = origin.read_record(run.workdir) if config.pretrained else None
  return {
    "task": task.name,
    "protocol": task.protocol,
    "selection": run.selection,
    "model": config.model.name,
    "seed": config.seed,
    "metric": run.objective.metric,
    **{key: value for key, value in scores.items() if key != "count"},
    "examples": scores["count"],
    "scored": _describe_scoring(run, best.step),
    "best_step": best.step,
    "selection_score": best.score,
    **({} if best.lost is None else {"damaged_best_step": best.lost}),
    **({} if record is None else {"pretrained": record}),
    "baselines": dict(baselines),
    "parameters": num_params,
    **_describe_state(run),
    "parameter_ratio": num_params / run.num_reference_params,
    "metrics_records": len(workdirs.read_metrics(run.workdir)[0]),
    "train_seconds": train_seconds,
    "wall_seconds": time.perf_counter() - began,
    "commit": ", ".join(dict.fromkeys([*trained, provenance.commit()])),
    "hardware": provenance.hardware(),
    "versions": provenance.versions(),
    "data": dict(task.info),
    "task_description": task.description(),
    "max_len": task.max_len,
    "config": config.as_dict(),
  }


def _describe_state(run: Run) -> dict[str, Any]:
  """Returns the bytes of the state of a causal token classifier, or {}."""
  mixer = run.model.config.variant.mixer
  if not run.task.causal or mixer not in names_with_step():
    return {}
  return {"state_bytes": models.state_bytes(run.model, run.task.max_len)}


def _describe_scoring(run: Run, step: int) -> dict[str, Any]:
  """Returns how the test split was scored, and after how many epochs.

  Steps on short examples belong to no epoch.
  """
  splits, c = run.task.splits, run.config
  steps = max(step - c.short_steps, 0)
  epochs = steps * c.batch_size / max(len(splits["train"]), 1)
  # Texts are scored in windows, and images on their centre.
  way = splits["test"].scoring()
  return {"split": "test", **way, "epochs": round(epochs, 4)}


def format_results(results: Mapping[str, Any]) -> str:
  """Returns the numbers of a run as a text table.

  Args:
    results: content of `results.json`.
  """
  task, protocol, seed = (results[k] for k in ("task", "protocol", "seed"))
  rows = list(_rows(results))
  width = max(len(name) for name, _ in rows)
  lines = [f"  {name:<{width}}  {value:>12}" for name, value in rows]
  remarks = [f"  {text}" for text in results["data"].get("remarks", ())]
  title = f"{task}, protocol {protocol}, seed {seed}"
  return "\n".join([title, *lines, *remarks])


def _interval(share: float, count: int) -> tuple[float, float]:
  """Returns the 95 % interval of Wilson of a share of `count` examples."""
  square = 1.96**2 / count
  middle = (share + square / 2) / (1 + square)
  half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the name and the value of every row of the table."""
  metric = results.get("metric", "accuracy")
  selection = split_title(results["task"], results["selection"])
  scored = "held-out" if selection.startswith("held-out") else "test"
  # Scores of the model, then of the baselines.
  others = ("sequence_accuracy", "accuracy_beyond", "accuracy_top5")
  for name in (metric, *others, "exact_match"):
    if name in results:
      title = f"{results['model']} {scored} {name.replace('_', ' ')}"
      yield title, format_score(name, results[name])
  for length, scores in results.get("by_length", {}).items():
    yield (
      f"{length} tokens",
      ", ".join(
        f"{name.removesuffix('_accuracy')} {format_score(name, scores[name])}"
        for name in (metric, "sequence_accuracy")
        if name in scores
      ),
    )
  for name, value in results["baselines"].items():
    yield name, format_score(metric, value)
  yield f"{UNITS.get(metric, 'examples')} scored", f"{results['examples']:,}"
  is_share = metric == "accuracy" and "sequence_accuracy" not in results
  if is_share and results["examples"] < FEW_EXAMPLES:
    low, high = _interval(results["accuracy"], results["examples"])
    yield "95 % interval of accuracy", f"{100 * low:.1f} to {100 * high:.1f} %"
  # Selection of the checkpoint, size and times.
  best = f"{results['best_step']}, {selection}"
  yield "best step, chosen on", best
  if "damaged_best_step" in results:
    yield "damaged best step", f"{results['damaged_best_step']}"
  yield "parameters", f"{results['parameters']:,}"
  if "state_bytes" in results:
    yield "bytes of the state", f"{results['state_bytes']:,}"
  ratio = f"{results['parameter_ratio']:.2f} times"
  yield "relative to the Transformer", ratio
  yield "training time", duration(results["train_seconds"])
  yield "wall time", duration(results["wall_seconds"])
  if "pretrained" in results:
    yield "pretrained", results["pretrained"]["folder"]
  # Report data that differ from the published data of the authors.
  data = results["data"]
  if not data.get("authors_counts", True):
    counts = [f"{count:,} {name}" for name, count in data["counts"].items()]
    yield "data", f"not the authors' counts: {', '.join(counts)}"
  elif (is_authors := data.get("authors_checksum", True)) is not True:
    what = "not the authors' archive"
    if is_authors is None:
      what = "an archive without a published checksum"
    yield "data", f"{what}: SHA-256 {data['sha256'][:12]}..."
