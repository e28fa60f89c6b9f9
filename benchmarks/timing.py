"""Measurements that all tables share: calls that take turns, and ratios."""

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

PAUSE = 0.02  # Seconds between two calls.
T = TypeVar("T")
Call = Callable[[], Any]
Calls = dict[str, Call]
Seconds = Mapping[str, list[float]]


def interleaved(calls: Mapping[str, Call], rounds: int) -> Seconds:
  """Returns seconds of every call in every round but the first, a warm-up.

  Each call takes its turn in every round, so that other work of the machine
  disturbs all calls alike. It begins after a pause, in which the threads of the
  call before come to rest: those of OpenMP wait for work at full speed.
  """
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      time.sleep(PAUSE)
      spent = timed(call)[1]
      # Round 0 compiles and fills caches, and is not counted.
      if number:
        seconds[name].append(spent)
  return seconds


def timed(call: Callable[..., T], *args: Any) -> tuple[T, float]:
  """Returns the result of `call(*args)`, and the seconds that it took."""
  began = time.perf_counter()
  result = call(*args)
  return result, time.perf_counter() - began


def ready(function: Callable[..., Any], *args: Any) -> Call:
  """Returns a callable that runs a JAX function and waits for its results."""
  return lambda: jax.block_until_ready(function(*args))


def median(seconds: Seconds, name: str) -> float:
  """Returns the median seconds of a call."""
  return statistics.median(seconds[name])


def ratio(seconds: Seconds, slow: str, fast: str) -> float:
  """Returns the speed-up of the call `fast` over the call `slow`.

  The ratio is the median over the rounds of each round's ratio.
  """
  pairs = zip(seconds[slow], seconds[fast], strict=True)
  return statistics.median(a / b for a, b in pairs)


def product() -> tuple[Call, float]:
  """Returns a call of large float32 products, and its FLOPs.

  It measures the machine's rate, by four products of 4096 x 1024 with
  1024 x 1024, one after the other in one program, so that no memory is
  allocated in between.
  """
  x, w = jnp.ones((4096, 1024)), jnp.full((1024, 1024), 1 / 1024)
  run = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x @ w, x))
  return ready(run, x), 4 * 2.0 * 4096 * 1024**2


def threads() -> int:
  """Returns the number of cores that JAX uses, for PyTorch's thread count."""
  return len(os.sched_getaffinity(0))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
  """Returns the power of the size that fits the values best."""
  # The slope of a line through logarithms.
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def in_a_process(code: str) -> str:
  """Returns what `code` prints in a process of its own."""
  run = [sys.executable, "-c", code]
  return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def peak_memory() -> int:
  """Returns the peak memory of this process in bytes (Linux)."""
  # getrusage would report at least the peak of the parent process.
  return status_bytes("VmHWM")


def status_bytes(field: str) -> int:
  """Returns the bytes of a field of /proc/self/status (Linux)."""
  with open("/proc/self/status") as file:
    (line,) = (line for line in file if line.startswith(f"{field}:"))
  return 1024 * int(line.split()[1])
