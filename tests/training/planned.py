"""Prints planned and measured bytes of the train steps of some configs as JSON.

It runs in a separate process, because the memory of other tests would be
measured too.
"""

import ctypes
import functools
import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxformers import config as configs
from jaxformers import models
from jaxformers.training import memory, state, steps
from tests import optimizers

STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")


def read_bytes(field):
  (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith(field))
  return 1024 * int(line.split()[1])


def measure(spec, batch_size, sizes):
  """Returns planned and measured bytes of a train step."""
  config = configs.plain(configs.load(spec))
  model = models.build(**config["model"] | {"num_layers": 1}, **sizes)
  tx, _ = optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  step = functools.partial(
    steps.train_step, model=model, tx=tx, seed=0, accumulate=1
  )
  batch = {
    "inputs": np.ones((batch_size, sizes["max_len"]), np.int32),
    "targets": np.zeros(batch_size, np.int32),
    "weights": np.ones(batch_size, np.float32),
  }
  shapes = jax.eval_shape(functools.partial(state.create, model, tx, 0))
  program = jax.jit(step, donate_argnums=0).lower(shapes, batch).compile()
  held = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes)
  size = sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(held)))
  # Return freed memory to the kernel, and reset the peak.
  gc.collect()
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  PEAK.write_text("5")
  before = read_bytes("VmRSS")
  jax.block_until_ready(program(held, batch))
  return memory.planned_bytes(program), read_bytes("VmHWM") - before + size


if __name__ == "__main__":
  print(json.dumps([measure(*case) for case in json.loads(sys.argv[1])]))
