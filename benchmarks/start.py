"""Time until the first step, and overhead of a step besides its model.

The first table has the time of each import, measured in a separate process. The
second table has the time from the start of a process to the first step of a
small run, with and without cached data and compiled programs. The third table
compares the time of a step with the time of its model. The difference is the
wait for the loader, the optimiser and the calls of the compiled step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import optax

from benchmarks.__main__ import main
from benchmarks.data import Row, Rows
from benchmarks.timing import (
  Call,
  in_a_process,
  interleaved,
  median,
  ratio,
  timed,
)
from jaxformers import config as configs
from jaxformers.training import compilers
from jaxformers.training.run import open_run
from jaxformers.training.steps import train_step
from jaxformers.training.trainer import Trainer

# Code of each row of the first table.
IMPORTS = {
  "Python": "",
  "jax": "import jax",
  "jaxformers.models": "import jaxformers.models",
  "all that trains": "import jaxformers.main, jaxformers.training.loop",
}
CONFIG = "configs/lra/listops.py:size=tiny"
TASK = {"num_train": 2_000, "num_validation": 200, "num_test": 200}
FIRST = "First step done"  # Beginning of the line that a run logs.
STEPPED = ("transject", "linear_transformer", "local")
BURST = 5  # Number of steps that are timed together.
DRAINED = 64  # Number of batches that are read in one go.


def imports(rounds: int) -> Rows:
  """Yields the times of processes that import a module and end."""
  calls = {k: functools.partial(in_a_process, v) for k, v in IMPORTS.items()}
  times = interleaved(calls, rounds)
  # Subtract the time in which Python starts and ends.
  bare = median(times, "Python")
  for name in IMPORTS:
    seconds = median(times, name)
    yield {"import": name, "s": seconds, "s besides Python": seconds - bare}


def until_first_step(folder: Path) -> float:
  """Returns the seconds from the start of a process to its first step.

  Args:
    folder: folder of the data and of the compiled programs.
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
  """Yields the time of the first step, without and with caches."""
  with tempfile.TemporaryDirectory() as folder:
    # The first process fills the caches that the other processes read.
    cold = until_first_step(Path(folder))
    warm = [until_first_step(Path(folder)) for _ in range(rounds)]
  yield {"first step of": CONFIG, "cache": "none, data made too", "s": cold}
  median_warm = statistics.median(warm)
  yield {"first step of": CONFIG, "cache": "warm", "s": median_warm}


def without_optimizer(trainer: Trainer) -> Call:
  """Returns a call of the model's part of a step: loss and gradients."""
  # Build the train step with an optimiser that does nothing.
  tx = optax.identity()
  step = functools.partial(
    train_step, model=trainer.model, tx=tx, seed=0, accumulate=trainer.parts
  )
  current = dataclasses.replace(trainer.run, tx=tx).initial_state()
  layout = trainer.layout
  run, _ = compilers.compile_jit(step, layout, state=current, donate=True)
  # Use the same batch in every call.
  batches = trainer.batches(0)
  batch = next(batches)
  batches.close()

  def call() -> None:
    nonlocal current
    current, sums = run(current, batch)
    jax.block_until_ready((current, sums))

  return call


def measure_steps(name: str, rounds: int) -> Row:
  """Measures the share of a step that is not spent in the model.

  A step waits for its batch, computes loss and gradients, and updates the
  parameters. In every round, `BURST` complete steps take turns with `BURST`
  calls of the model's part on a batch in memory.

  Args:
    name: name of the model.
    rounds: number of timed rounds.
  """
  config = configs.load(f"{CONFIG},model={name}")
  config.task.update(TASK)
  # Batches of one length, so that every step has the same work.
  config.buckets = 1
  with tempfile.TemporaryDirectory() as folder:
    config.data_dir = f"{folder}/data"
    run = Trainer(open_run(config, Path(folder) / "run"))
    batches = run.batches(0)
    waited: list[float] = []

    def step() -> None:
      batch, seconds = timed(next, batches)
      waited.append(seconds)
      run.state, sums = run.train_step(run.state, batch)
      jax.block_until_ready((run.state, sums))

    # Time complete steps and the model's part in turns.
    model = without_optimizer(run)
    calls = {
      "step": functools.partial(repeat, step),
      "model": functools.partial(repeat, model),
    }
    seconds = interleaved(calls, rounds)
    batches.close()

    # Time the loader without training, in one go: single batches would be read
    # during the pauses between rounds.
    def drain() -> None:
      untrained = run.batches(0)
      for batch in itertools.islice(untrained, DRAINED):
        jax.block_until_ready(batch)
      untrained.close()

    read = interleaved({"batches": drain}, rounds)
  # Remove the waits of the warm-up round, which compiles.
  del waited[:BURST]
  return {
    "model": name,
    "ms per step": 1e3 * median(seconds, "step") / BURST,
    "ms of the model": 1e3 * median(seconds, "model") / BURST,
    "share that is not the model": 1 - ratio(seconds, "model", "step"),
    "share waiting for batches": sum(waited) / sum(seconds["step"]),
    "ms per batch, loader only": 1e3 * median(read, "batches") / DRAINED,
  }


def steps(rounds: int) -> Rows:
  """Yields the step times of models, each in a process that keeps memory."""
  for name in STEPPED:
    text = in_a_process(
      "import json\n"
      "from jaxformers.foundations import allocator\n"
      "allocator.keep_freed_memory()\n"
      "from benchmarks.start import measure_steps\n"
      f"print(json.dumps(measure_steps({name!r}, {rounds})))"
    )
    yield json.loads(text.splitlines()[-1])


def repeat(call: Call) -> None:
  """Makes a call `BURST` times."""
  for _ in range(BURST):
    call()


def tables(rounds: int) -> dict[str, Rows]:
  """Measures the tables of imports, of the first step and of later steps."""
  return {
    "import": imports(rounds),
    "first step": first_steps(min(rounds, 5)),
    "step": steps(rounds),
  }


if __name__ == "__main__":
  main(["--tables=start", *sys.argv[1:]])
