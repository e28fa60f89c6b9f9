"""How long it takes to begin, and whether a step ever waits for its batch.

Imports, each in a process of its own; the first step of a small run, from the
start of the process, with nothing cached and with data and compiled programs
cached; and how long the steps of a run waited for what the loader makes, beside
how fast the loader is where nothing else runs.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.__main__ import main
from benchmarks.timing import in_a_process, interleaved, median
from jaxformers import config as configs
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer

IMPORTS = {
  "Python": "",
  "jax": "import jax",
  "jaxformers.models": "import jaxformers.models",
  "all that trains": "import jaxformers.main, jaxformers.training.loop",
}
CONFIG = "configs/lra/listops.py:size=tiny"
TASK = {"num_train": 2_000, "num_validation": 200, "num_test": 200}
FIRST = "First step done"
STEPS = 50


def imports(rounds: int) -> list[dict[str, Any]]:
  """Seconds of processes that import and end."""
  calls = {
    name: functools.partial(in_a_process, code)
    for name, code in IMPORTS.items()
  }
  seconds = interleaved(calls, rounds)
  bare = median(seconds, "Python")
  return [
    {
      "import": name,
      "s": median(seconds, name),
      "s beside Python": median(seconds, name) - bare,
    }
    for name in IMPORTS
  ]


def until_first_step(folder: Path) -> float:
  """Seconds from the start of a process to its first step.

  Args:
    folder: where it keeps data and compiled programs.
  """
  command = [sys.executable, "-m", "jaxformers.main", f"--config={CONFIG}"]
  command += [f"--config.task.{key}={value}" for key, value in TASK.items()]
  with tempfile.TemporaryDirectory() as workdir:
    command += [f"--workdir={workdir}", f"--config.data_dir={folder}/data"]
    began = time.perf_counter()
    with subprocess.Popen(
      command,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"},
    ) as process:
      for line in process.stderr or ():
        if FIRST in line:
          spent = time.perf_counter() - began
          process.kill()
          return spent
  raise RuntimeError(f"{' '.join(command)} ended before its first step.")


def first_steps(rounds: int) -> list[dict[str, Any]]:
  """Seconds to the first step, with and without what is cached."""
  with tempfile.TemporaryDirectory() as folder:
    cold = until_first_step(Path(folder))
    warm = [until_first_step(Path(folder)) for _ in range(rounds)]
  return [
    {"first step of": CONFIG, "cache": "none, data made too", "s": cold},
    {"first step of": CONFIG, "cache": "warm", "s": statistics.median(warm)},
  ]


def waiting() -> list[dict[str, Any]]:
  """Milliseconds that steps took and that they waited for their batch."""
  config = configs.load(CONFIG)
  config.task.update(TASK)
  with tempfile.TemporaryDirectory() as folder:
    config.data_dir = f"{folder}/data"
    run = Trainer(open_run(config, Path(folder) / "run"))
    batches = run.batches(0)
    waited, whole = [], []
    for _ in range(STEPS):
      began = time.perf_counter()
      batch = next(batches)
      waited.append(time.perf_counter() - began)
      run.state, sums = run.train_step(run.state, batch)
      jax.block_until_ready(sums)
      whole.append(time.perf_counter() - began)
    batches.close()
    alone = run.batches(0)
    next(alone)
    began = time.perf_counter()
    for _ in range(STEPS):
      jax.block_until_ready(next(alone))
    spent = time.perf_counter() - began
    alone.close()
  del waited[:5], whole[:5]  # Compilation, and what was ready before.
  return [
    {
      "config": CONFIG,
      "ms a step": 1e3 * statistics.median(whole),
      "ms waited for a batch": 1e3 * statistics.median(waited),
      "share of all steps": sum(waited) / sum(whole),
      "ms a batch, loader alone": 1e3 * spent / STEPS,
    }
  ]


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
  """Start-up and input."""
  return {
    "import": imports(rounds),
    "first step": first_steps(min(rounds, 5)),
    "input": waiting(),
  }


if __name__ == "__main__":
  main(["--tables=start", *sys.argv[1:]])
