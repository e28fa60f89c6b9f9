"""Estimates of steps, hours and memory of runs, before any preparation."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.config import RunConfig
from jaxformers.models import attention, build, cost
from jaxformers.sweep.plans import Data
from jaxformers.training import topologies

# A training step reaches this share of the rate of a large product, and takes
# as long as this number of forward passes: rough figures of docs/mixers.md.
SHARE, PASSES = 0.35, 3.0
BYTES_OF_STATE = 16  # Per parameter: itself, its gradient, two means of Adam.
COUNTED = ("model", "sizes", "length")


class Estimate(NamedTuple):
  """Estimated cost of a run.

  Attributes:
    steps: number of training steps.
    hours: hours of training and evaluation on the local device.
    gigabytes: memory of a training step, including its state.
  """

  steps: int
  hours: float
  gigabytes: float


def compiled_hours(config: RunConfig, data: Data, device: str) -> float:
  """Returns the hours of a run by its compiled steps, without a device.

  Every batch counts as the longest. The time of a step is the longest of the
  compiler's own estimate and of the times at the peaks of the device; loading,
  communication and checkpoints are not counted.

  Args:
    config: config of the run.
    data: facts about the task of the config.
    device: topology of a TPU slice, or GPUs; see `topologies.read_name`.

  Raises:
    UserError: for an unknown device, or if the steps do not fit.
  """
  # The processes that count costs do not need what compiles a training step.
  from jaxformers.training.ahead import Ahead

  kind, _ = topologies.read_name(device)
  devices = topologies.describe_devices(device)
  ahead = Ahead(config, devices, topologies.CHIPS[kind], data.sizes)
  scored = -(-data.validation // config.eval_batch_size)
  calls = config.total_steps // config.eval_steps * scored
  milliseconds = config.total_steps * ahead.train().static_ms
  milliseconds += calls * ahead.evaluation().static_ms
  return milliseconds / 3_600_000


def measure_rate(size: int = 2_048, rounds: int = 5) -> float:
  """Measures the operations per second of a large float32 product."""
  x = jnp.ones((size, size))
  product = jax.jit(lambda x: x @ x)
  jax.block_until_ready(product(x))
  # Take the fastest round: other work only makes it slower.
  seconds = []
  for _ in range(rounds):
    began = time.perf_counter()
    jax.block_until_ready(product(x))
    seconds.append(time.perf_counter() - began)
  return 2 * size**3 / min(seconds)


def estimate_all(
  configs: Sequence[RunConfig], data: Sequence[Data], rate: float
) -> list[Estimate]:
  """Returns the estimate of each config.

  All examples count as long as the longest, so the hours are upper bounds for
  tasks of texts. The cost of one layer is counted and multiplied by the number
  of layers. The counted programs are not run; each core counts some in a
  process.

  Args:
    configs: configs of runs.
    data: facts about the tasks of the configs.
    rate: operations per second; see `measure_rate`.
  """
  # Count the cost of each distinct model once.
  pairs = zip(configs, data, strict=True)
  keys = [_key(config, facts) for config, facts in pairs]
  distinct = list(dict.fromkeys(keys))
  with concurrent.futures.ProcessPoolExecutor(
    min(len(distinct), os.cpu_count() or 1),
    mp_context=multiprocessing.get_context("spawn"),
    initializer=_start,
  ) as pool:
    counts = dict(zip(distinct, pool.map(_count, distinct), strict=True))
  return [
    estimate(config, facts, counts[key], rate)
    for config, facts, key in zip(configs, data, keys, strict=True)
  ]


def estimate(
  config: RunConfig, data: Data, count: cost.Cost, rate: float
) -> Estimate:
  """Returns the estimate of a config from the cost of one example."""
  # Count the layers, for all sequences of an example.
  steps, batch = config.total_steps, config.batch_size
  sequences = data.sizes.get("num_inputs", 1)
  factor = sequences * config.model.num_layers
  # Operations of all training steps and all evaluations.
  scored = steps // config.eval_steps * data.validation
  operations = factor * (count.flops + count.elementwise)
  operations *= PASSES * steps * batch + scored
  seconds = operations / (SHARE * rate)
  # Only one part of a batch is in memory; accumulate=0 counts as one part.
  rows = -(-batch // max(config.accumulate, 1))
  memory = factor * rows * count.activations
  memory += BYTES_OF_STATE * count.parameters * config.model.num_layers
  return Estimate(steps, seconds / 3_600, memory / 1e9)


def _start() -> None:
  # Programs are traced but not run: keep the accelerator free, and draw no
  # random arrays.
  jax.config.update("jax_platforms", "cpu")
  attention.LARGEST_CONSTANT = 0


def _key(config: RunConfig, data: Data) -> str:
  """Returns a key of everything on which the cost of an example depends."""
  sizes = dict(data.sizes)
  # A config may cut its examples to a smaller length.
  options = config.task.options
  length = options.get("max_len") or sizes["max_len"]
  if sizes["max_len"]:
    sizes["max_len"] = min(length, sizes["max_len"])
  sizes["vocab_size"] = options.get("vocab_size") or sizes["vocab_size"]
  # A few more classes or ids do not change the cost, and both sequences of a
  # pair cost the same.
  if sizes["vocab_size"] < 300 and not sizes.get("image"):
    sizes |= {"vocab_size": 257, "num_classes": 10}
  # Count a single layer, which `estimate` multiplies.
  model = {**config.model.as_dict(), "num_layers": 1}
  # Training scores only its targets, most of them in the first cluster.
  if cutoffs := model.get("embedding", {}).get("cutoffs"):
    model["embedding"] = {"scale": model["embedding"].get("scale", 1.0)}
    sizes["vocab_size"] = cutoffs[0]
  if sizes.pop("num_inputs", 1) > 1:
    model.pop("interaction", None)
  values = (model, sizes, sizes["max_len"])
  return json.dumps(dict(zip(COUNTED, values, strict=True)), sort_keys=True)


def _count(key: str) -> cost.Cost:
  """Returns the cost of one example; `key` is from `_key`."""
  model, sizes, length = (json.loads(key)[name] for name in COUNTED)
  if "image" in sizes:
    sizes["image"] = tuple(sizes["image"])
  return cost.count_cost(build(**model, **sizes), length)
