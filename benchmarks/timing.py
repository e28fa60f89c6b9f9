"""What all tables of speed share: calls that take turns, and their ratios."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Call = Callable[[], Any]
Seconds = Mapping[str, list[float]]


def interleaved(calls: Mapping[str, Call], rounds: int) -> Seconds:
  """Seconds of every call in every round; the first round is not counted.

  Each call takes its turn in every round, so that what else the machine does
  meets all alike.
  """
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      began = time.perf_counter()
      call()
      if number:
        seconds[name].append(time.perf_counter() - began)
  return seconds


def median(seconds: Seconds, name: str) -> float:
  """Of a call's seconds."""
  return statistics.median(seconds[name])


def ratio(seconds: Seconds, slow: str, fast: str) -> float:
  """How many times as fast one is as another: the median over the rounds."""
  pairs = zip(seconds[slow], seconds[fast], strict=True)
  return statistics.median(a / b for a, b in pairs)


def product() -> tuple[Call, float]:
  """Float32 products that run at the machine's rate, and their FLOPs.

  Four of 4096 x 1024 with 1024 x 1024, one after the other in one program, so
  that no memory is asked for in between.
  """
  x, w = jnp.ones((4096, 1024)), jnp.full((1024, 1024), 1 / 1024)
  run = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x @ w, x))
  return lambda: run(x).block_until_ready(), 4 * 2.0 * 4096 * 1024**2


def threads() -> int:
  """As many as this process may use, for JAX and PyTorch alike."""
  return len(os.sched_getaffinity(0))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
  """Of the power of the size that fits the values best."""
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def in_a_process(code: str) -> str:
  """What Python prints that runs `code` in a process of its own."""
  run = [sys.executable, "-c", code]
  return subprocess.run(run, check=True, capture_output=True, text=True).stdout
