"""Bytes that a program plans, and bytes that a device has."""

import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from jaxformers.training import memory
from tests.marks import long_except


def compiled(donate):
  # The result of addition can take the place of its argument.
  add = jax.jit(lambda x, y: x + y[0], donate_argnums=(0,) if donate else ())
  like = jax.ShapeDtypeStruct((1_000, 1_000), jnp.float32)
  return add.lower(like, like).compile()


def test_planned_bytes_count_donated_arguments_once():
  size = 4 * 1_000**2
  assert memory.planned_bytes(compiled(False)) == pytest.approx(
    3 * size, rel=0.1
  )
  assert memory.planned_bytes(compiled(True)) == pytest.approx(
    2 * size, rel=0.1
  )


@pytest.mark.parametrize(
  ("memory_space", "error", "message"),
  [
    ("hbm. Used 3.50G", memory.TooLargeError, "needs 3.50 GiB"),
    ("hbm", memory.TooLargeError, "needs more memory"),
    ("vmem", RuntimeError, "vmem"),
  ],
)
def test_only_the_main_memory_asks_for_more_parts(memory_space, error, message):
  def refuse():
    raise jax.errors.JaxRuntimeError(
      f"RESOURCE_EXHAUSTED: Ran out of memory in memory space {memory_space}"
    )

  with pytest.raises(error, match=message):
    memory.compile_step(types.SimpleNamespace(compile=refuse))


def test_planned_bytes_without_analysis_are_0():
  silent = types.SimpleNamespace(memory_analysis=lambda: None)
  assert memory.planned_bytes(silent) == 0


def test_device_bytes_of_a_host_are_memory_or_cgroup_limit(
  tmp_path, monkeypatch
):
  info, group = tmp_path / "meminfo", tmp_path / "memory.max"
  info.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\n")
  monkeypatch.setattr(memory, "MEMORY_INFO", info)
  monkeypatch.setattr(memory, "CGROUP_LIMITS", (str(group),))
  count = jax.local_device_count()
  (device, *_) = jax.devices("cpu")
  assert memory.device_bytes(device) == 1_024_000 // count
  group.write_text("max\n")
  assert memory.device_bytes(device) == 1_024_000 // count
  group.write_text("4096\n")
  assert memory.device_bytes(device) == 4_096 // count
  info.unlink()
  assert memory.device_bytes(device) == 0


def test_device_bytes_of_an_accelerator_are_its_limit():
  def device(stats):
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

  assert memory.device_bytes(device({"bytes_limit": 7})) == 7
  assert memory.device_bytes(device({})) == 0
  assert memory.device_bytes(device(None)) == 0


TEXT = {"vocab_size": 257, "max_len": 2_000, "num_classes": 2}
IMAGE = {"vocab_size": 256, "max_len": 1_024, "num_classes": 10}
CONFIGS = [
  ("configs/lra/text.py:size=tiny,model=transject", 64, TEXT),
  ("configs/lra/text.py:size=tiny,model=transformer", 16, TEXT),
  ("configs/lra/text.py:size=tiny,model=linformer", 16, TEXT),
  ("configs/lra/image.py:size=matched,model=random_transject", 32, IMAGE),
  ("configs/lra/text.py:size=tiny,model=linear_transformer", 16, TEXT),
]


@pytest.mark.parametrize(
  "case", long_except([CONFIGS[0]], CONFIGS), ids=lambda case: case[0]
)
@pytest.mark.skipif(
  not os.access("/proc/self/clear_refs", os.W_OK),
  reason="the peak memory of a process cannot be read here",
)
@pytest.mark.long
def test_planned_bytes_are_near_the_measured_peak_of_a_step(request, case):
  """Within 20 %, for steps of more than 100 MB.

  What the library of products holds meanwhile is not planned: it is 27 % for
  Performer, and 10 % or less for those here.
  """
  run = [sys.executable, "-m", "tests.training.planned", json.dumps([case])]
  # The devices and threads of the suite would have memory of their own.
  suite = ("XLA_FLAGS", "NPROC")
  env = {k: v for k, v in os.environ.items() if k not in suite}
  root = request.config.rootpath
  printed = subprocess.run(
    run, check=True, capture_output=True, cwd=root, env=env
  ).stdout
  ((planned, measured),) = json.loads(printed)
  assert planned > 100e6
  assert measured == pytest.approx(planned, rel=0.2)
