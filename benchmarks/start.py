"""Time until the first step, and time that steps wait for their batches.

The first table has the time of each import, in a process of its own. The second
has the time from the start of a process to the first step of a small run, with
and without cached data and compiled programs. The third has the time that steps
wait for the loader, and the speed of the loader alone.
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

from benchmarks.__main__ import main
from benchmarks.data import Rows
from benchmarks.timing import in_a_process, interleaved, median, ready, timed
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


def imports(rounds: int) -> Rows:
  """Times processes that import a module and end."""
  calls = {k: functools.partial(in_a_process, v) for k, v in IMPORTS.items()}
  times = interleaved(calls, rounds)
  # Every process also takes the time in which Python starts and ends.
  bare = median(times, "Python")
  for name in IMPORTS:
    seconds = median(times, name)
    yield {"import": name, "s": seconds, "s besides Python": seconds - bare}


def until_first_step(folder: Path) -> float:
  """Returns seconds from the start of a process to its first step.

  Args:
    folder: folder of its data and compiled programs.
  """
  command = [sys.executable, "-m", "jaxformers.main", f"--config={CONFIG}"]
  command += [f"--config.task.{key}={value}" for key, value in TASK.items()]
  # Start a run, read its log until the first step, and kill it.
  with tempfile.TemporaryDirectory() as workdir:
    command += [f"--workdir={workdir}", f"--config.data_dir={folder}/data"]
    began = time.perf_counter()
    # The log of a run goes to stderr.
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
    with subprocess.Popen(
      command, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
      if any(FIRST in line for line in process.stderr or ()):
        spent = time.perf_counter() - began
        process.kill()
        return spent
  raise RuntimeError(f"{' '.join(command)} ended before its first step.")


def first_steps(rounds: int) -> Rows:
  """Times the first step, without and with cached data and programs."""
  with tempfile.TemporaryDirectory() as folder:
    # The first process fills the caches that the others read.
    cold = until_first_step(Path(folder))
    warm = [until_first_step(Path(folder)) for _ in range(rounds)]
  yield {"first step of": CONFIG, "cache": "none, data made too", "s": cold}
  median_warm = statistics.median(warm)
  yield {"first step of": CONFIG, "cache": "warm", "s": median_warm}


def measure_waiting() -> Rows:
  """Yields the milliseconds of steps, and of waiting for their batches."""
  config = configs.load(CONFIG)
  config.task.update(TASK)
  with tempfile.TemporaryDirectory() as folder:
    config.data_dir = f"{folder}/data"
    run = Trainer(open_run(config, Path(folder) / "run"))
    batches = run.batches(0)
    # Train, and note how long each step waited.
    waited, total = [], []
    for _ in range(STEPS):
      batch, seconds = timed(next, batches)
      waited.append(seconds)
      (run.state, _), seconds = timed(ready(run.train_step, run.state, batch))
      total.append(waited[-1] + seconds)
    batches.close()
    # Read batches without training.
    alone = run.batches(0)
    read = interleaved({"batch": ready(next, alone)}, STEPS)
    alone.close()
  del waited[:5], total[:5]  # Compilation, and batches that were ready.
  yield {
    "config": CONFIG,
    "ms per step": 1e3 * statistics.median(total),
    "ms waited for a batch": 1e3 * statistics.median(waited),
    "share of all steps": sum(waited) / sum(total),
    "ms per batch, loader alone": 1e3 * statistics.mean(read["batch"]),
  }


def tables(rounds: int) -> dict[str, Rows]:
  """Measures start-up and input."""
  return {
    "import": imports(rounds),
    "first step": first_steps(min(rounds, 5)),
    "input": measure_waiting(),
  }


if __name__ == "__main__":
  main(["--tables=start", *sys.argv[1:]])
