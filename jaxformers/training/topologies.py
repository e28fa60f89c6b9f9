"""Descriptions of accelerators, for which JAX compiles without having them.

libtpu compiles for the description of a TPU topology on any x86 machine, and
JAX's plugin for CUDA compiles for the description of a GPU. Neither needs a
device or a driver.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

# What libtpu reads: no metadata server, no lock file for one process, and no
# log about the hosts and the type of a slice that is not there.
ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TPU_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published peaks of one device, as JAX counts devices.

  Attributes:
    gib: memory for arrays in GiB: what the compiler of TPUs plans with, which
      is a little less than the chip has; three quarters of a GPU's, which JAX
      takes by default.
    bfloat16, float32: dense products in TFLOP/s, as JAX computes them by
      default: float32 is one pass of bfloat16 on a TPU, and TF32 on a GPU.
    highest: the same for float32 at the highest precision, which takes six
      passes of bfloat16 on a TPU, and no tensor cores on a GPU.
    bandwidth: bandwidth of the memory, in GB/s.
    clock: clock of a TPU's cores in GHz, by which the compiler's cycles become
      seconds: the published peak, divided by the operations of all matrix units
      in a cycle; 0 if it is not known.
    axes: number of axes of a TPU's topologies; 0 for a GPU.
    cloud: first part of the cloud's types of slices, and the number that such
      a type counts for each chip: v5p-8 has four chips.
  """

  gib: float
  bfloat16: float
  float32: float
  highest: float
  bandwidth: float
  clock: float = 0
  axes: int = 0
  cloud: tuple[str, int] = ("", 1)


# Sources: Google Cloud's pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x", which
# has two devices on each chip; NVIDIA's data sheets of the H100 and H200 (SXM)
# and of the DGX B200, without sparsity. Memory: libtpu 0.0.42, which refuses a
# program with more, and targets/*.txtpb.
CHIPS = {
  "v4": Chip(30.75, 275, 275, 275 / 6, 1_228, 1.05, 3, ("v4", 2)),
  "v5e": Chip(15.75, 197, 197, 197 / 6, 819, 1.5, 2, ("v5litepod", 1)),
  "v5p": Chip(95.74, 459, 459, 459 / 6, 2_765, 1.75, 3, ("v5p", 2)),
  "v6e": Chip(31.25, 918, 918, 918 / 6, 1_640, 1.75, 2, ("v6e", 1)),
  "tpu7x": Chip(94.75, 1_153, 1_153, 1_153 / 6, 3_690, 0, 3, ("tpu7x", 2)),
  "h100": Chip(0.75 * 79.1, 989, 494, 67, 3_352),
  "h200": Chip(0.75 * 141, 989, 494, 67, 4_800),
  "b200": Chip(0.75 * 178.3, 2_250, 1_125, 75, 7_672),
}


def read_name(name: str) -> tuple[str, tuple[int, ...]]:
  """Returns the kind and the shape of a topology.

  Args:
    name: kind and shape, such as "v5e:4x4" for a TPU, "h100:8" for eight GPUs
      or "h100:2x8" for two hosts; or the cloud's type of a slice, such as
      "v5litepod-16".

  Raises:
    UserError: for an unknown kind, or a shape that is not a product of numbers.
  """
  kind, _, shape = name.partition(":")
  if match := re.fullmatch(r"(\w+)-(\d+)", name):
    return _read_type(name, match[1], int(match[2]))
  chip = CHIPS[choose("device", kind, CHIPS)]
  most = 2 if chip.axes else 1
  shape = shape or ("" if chip.axes else "1")
  if not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{most - 1},{most}}}", shape):
    example = "2x2" if chip.axes else "8"
    raise UserError(
      f"--device {name}: {shape!r} is not the shape of a topology. Write "
      f"{kind}:{example}, for example."
    )
  return kind, tuple(map(int, shape.split("x")))


def _read_type(
  name: str, family: str, count: int
) -> tuple[str, tuple[int, ...]]:
  """Returns the kind and the shape of the cloud's type of a slice."""
  kinds = {chip.cloud[0]: kind for kind, chip in CHIPS.items() if chip.axes}
  kind = kinds[choose("type of slice", family, kinds)]
  chip = CHIPS[kind]
  chips, rest = divmod(count, chip.cloud[1])
  if rest or chips < 1 or chips & (chips - 1):
    raise UserError(
      f"--device {name}: the number is no power of two of chips. Give the "
      f"topology of the slice instead, such as {kind}:2x2."
    )
  # The cloud divides a power of two evenly among the axes, ones at the end.
  power = chips.bit_length() - 1
  sizes = [2 ** ((power + k) // chip.axes) for k in range(chip.axes)]
  return kind, tuple(sorted(sizes, key=lambda size: (size == 1, size)))


def describe_devices(name: str, slices: int = 1) -> Sequence[Any]:
  """Returns the devices of a topology, of which a mesh can be made.

  Args:
    name: topology of a slice; see `read_name`.
    slices: number of slices, which are connected by the data center's network.

  Raises:
    UserError: for an unknown topology, or without the compiler for it.
  """
  kind, shape = read_name(name)
  if CHIPS[kind].axes:
    platform, plugin, extra, form = "tpu", "libtpu", "aot", _tpus
  else:
    platform, plugin, extra, form = "cuda", "jax_cuda13_plugin", "cuda", _gpus
  if importlib.util.find_spec(plugin) is None:
    raise UserError(
      f"--device {name} needs {plugin}: pip install -e '.[{extra}]'."
    )
  from jax.experimental import topologies

  written, options = form(kind, shape, slices)
  try:
    topology = topologies.get_topology_desc(
      written, platform=platform, **options
    )
  except Exception as error:  # The plugin raises errors of several kinds.
    raise UserError(
      f"The compiler cannot describe --device {name}: {error}. Shapes that "
      "exist are v5e:1x1, v5e:4x4, v5p:2x2x1 and h100:8, for example."
    ) from error
  return topology.devices


def _tpus(
  kind: str, shape: tuple[int, ...], slices: int
) -> tuple[str, dict[str, Any]]:
  """Returns the name and the options of slices of TPUs, as JAX takes them."""
  for variable, value in ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  axes = shape + (1,) * (CHIPS[kind].axes - len(shape))
  options: dict[str, Any] = {"num_slices": slices}
  # The two cores of a v4 chip work as one device.
  if kind == "v4":
    options["chip_config_name"] = "megacore"
  # A host has several chips, unless the slice is a single one.
  if math.prod(axes) == 1:
    options["chips_per_host_bounds"] = [1, 1, 1]
  return f"{kind}:{'x'.join(map(str, axes))}", options


def _gpus(
  kind: str, shape: tuple[int, ...], slices: int
) -> tuple[str, dict[str, Any]]:
  """Returns the name and the options of hosts of GPUs, as JAX takes them."""
  # Kernels are chosen by rules: measuring them would need the device.
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_gpu_autotune_level" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
  target = Path(__file__).parent / "targets" / f"{kind}.txtpb"
  hosts, devices = (1, *shape)[-2:]
  return kind, {
    "topology": f"{slices}x{hosts}x{devices}",
    "target_config": target.read_text(),
  }
