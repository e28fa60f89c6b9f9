"""Measurement tools that all tables share: interleaved calls and ratios."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

PAUSE = 0.02  # Pause between two calls in seconds.
T = TypeVar("T")
Call = Callable[[], Any]
Calls = dict[str, Call]
Seconds = Mapping[str, list[float]]


def interleaved(calls: Mapping[str, Call], rounds: int) -> Seconds:
  """Returns the seconds of every call in every round.

  Every call runs once in each round, so that other work of the machine disturbs
  all calls equally. Each call starts after a pause, in which the threads of the
  previous call become idle; OpenMP's threads wait for work in a busy loop. A
  first round is a warm-up and is not counted.

  Args:
    calls: calls by name.
    rounds: number of rounds that are counted.
  """
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      time.sleep(PAUSE)
      spent = timed(call)[1]
      # Do not count round 0, which compiles and fills caches.
      if number:
        seconds[name].append(spent)
  return seconds


def timed(call: Callable[..., T], *args: Any) -> tuple[T, float]:
  """Returns the result of `call(*args)`, and the seconds that it took."""
  began = time.perf_counter()
  result = call(*args)
  return result, time.perf_counter() - began


def ready(function: Callable[..., Any], *args: Any) -> Call:
  """Returns a call that runs a JAX function and waits for its results."""
  return lambda: jax.block_until_ready(function(*args))


def median(seconds: Seconds, name: str) -> float:
  """Returns the median seconds of a call."""
  return statistics.median(seconds[name])


def ratio(seconds: Seconds, slow: str, fast: str) -> float:
  """Returns the speed-up of the call `fast` over the call `slow`.

  The result is the median of the ratios of all rounds.
  """
  pairs = zip(seconds[slow], seconds[fast], strict=True)
  return statistics.median(a / b for a, b in pairs)


def product() -> tuple[Call, float]:
  """Returns a call of large float32 products, and its FLOPs.

  The call measures the machine's rate. It multiplies a 4096 x 1024 matrix four
  times by a 1024 x 1024 matrix, in one program, so that no memory is allocated
  between the products.
  """
  x, w = jnp.ones((4096, 1024)), jnp.full((1024, 1024), 1 / 1024)
  run = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x @ w, x))
  return ready(run, x), 4 * 2.0 * 4096 * 1024**2


def threads() -> int:
  """Returns the number of cores of this process, for PyTorch's threads."""
  return len(os.sched_getaffinity(0))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
  """Fits values = c * sizes ** p, and returns the exponent p."""
  # Fit a line to the logarithms, and return its slope.
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def in_a_process(code: str) -> str:
  """Runs Python code in a separate process; returns the text it prints."""
  run = [sys.executable, "-c", code]
  return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def peak_memory() -> int:
  """Returns the peak memory of this process in bytes (Linux)."""
  # Not getrusage, which reports at least the peak of the parent process.
  return status_bytes("VmHWM")


def status_bytes(field: str) -> int:
  """Returns the value of a field of /proc/self/status in bytes (Linux)."""
  with open("/proc/self/status") as file:
    (line,) = (line for line in file if line.startswith(f"{field}:"))
  return 1024 * int(line.split()[1])
