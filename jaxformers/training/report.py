"""Where a run's numbers come from, and the table at its end."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxformers
from jaxformers.training.progress import duration

UNITS = {"perplexity": "tokens", "mean_iou": "images"}


def score(metric: str, value: float) -> str:
  """A score for people: a share in percent, a perplexity as it is."""
  return f"{value:.2f}" if metric == "perplexity" else f"{value:.2%}"


def scores(means: Mapping[str, Any], metric: str) -> str:
  """Loss and metric on a line."""
  name = metric.replace("_", " ")
  return f"loss {means['loss']:.4f}  {name} {score(metric, means[metric])}"


def commit() -> str:
  """The git commit of the code, "+changes" if it differs; else the version."""
  folder = Path(__file__).parent

  def git(*command: str) -> str:
    return subprocess.run(
      ["git", "-C", str(folder), *command],
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  try:
    # An installed package may lie inside somebody else's repository.
    git("ls-files", "--error-unmatch", __file__)
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return f"version {jaxformers.__version__}"


def hardware() -> dict[str, Any]:
  """The devices, the processor and its cores."""
  devices = jax.devices()
  processor = platform.processor() or platform.machine()
  info = Path("/proc/cpuinfo")
  if info.exists():
    names = [
      line.partition(":")[2].strip()
      for line in info.read_text().splitlines()
      if line.startswith("model name")
    ]
    processor = names[0] if names else processor
  return {
    "devices": len(devices),
    "device_kind": devices[0].device_kind,
    "platform": devices[0].platform,
    "processor": processor,
    "cores": os.cpu_count(),
  }


def versions() -> dict[str, str]:
  """Versions of the libraries that numbers depend on."""
  names = ("jax", "jaxlib", "flax", "optax", "numpy")
  return {name: metadata.version(name) for name in names} | {
    "python": platform.python_version(),
    "jaxformers": jaxformers.__version__,
  }


def table(results: Mapping[str, Any]) -> str:
  """The numbers of a run, for people."""
  metric = results.get("metric", "accuracy")
  also = [name for name in ("accuracy_top5",) if name in results]
  rows = [
    *(
      (
        f"{results['model']} test {name.replace('_', ' ')}",
        score(name, results[name]),
      )
      for name in (metric, *also)
    ),
    *(
      (name, score(metric, value))
      for name, value in results["baselines"].items()
    ),
    (
      f"{UNITS.get(metric, 'examples')} scored",
      f"{results['examples']:,}",
    ),
    ("best step, chosen on", f"{results['best_step']}, {results['selection']}"),
    *(
      ("damaged best step", f"{results[key]}")
      for key in ("damaged_best_step",)
      if key in results
    ),
    ("parameters", f"{results['parameters']:,}"),
    ("relative to the Transformer", f"{results['parameter_ratio']:.2f} times"),
    ("training time", duration(results["train_seconds"])),
    ("wall time", duration(results["wall_seconds"])),
  ]
  if not results["data"].get("authors_counts", True):
    counts = results["data"]["counts"].items()
    text = ", ".join(f"{count:,} {name}" for name, count in counts)
    rows.append(("data", f"not the authors' counts: {text}"))
  elif not results["data"].get("authors_checksum", True):
    sha256 = results["data"]["sha256"][:12]
    rows.append(("data", f"not the authors' archive: SHA-256 {sha256}..."))
  title = f"{results['task']}, protocol {results['protocol']}"
  title += f", seed {results['seed']}"
  width = max(len(name) for name, _ in rows)
  lines = [f"  {name:<{width}}  {value:>12}" for name, value in rows]
  return "\n".join([title, *lines])
