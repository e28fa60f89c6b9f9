"""Descriptions of accelerators, for which JAX compiles without having them.

libtpu compiles for the description of a TPU topology on any x86 machine, and
JAX's plugin for CUDA compiles for the description of a GPU. Neither needs a
device or a driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

# How to install the compiler for TPUs, and for GPUs.
INSTALL = "pip install -e '.[aot]'"
INSTALL_CUDA = "pip install 'jax[cuda13]'"
# What libtpu reads: no metadata server, and no lock file for one process. Its
# log, which complains about absent hosts, is no fault of the program.
ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TPU_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published peaks of one device, as JAX counts devices.

  Attributes:
    gib: memory that JAX takes by default, in GiB: all of a TPU's, and three
      quarters of a GPU's.
    bfloat16, float32: dense products in TFLOP/s, as JAX computes them by
      default: float32 is one pass of bfloat16 on a TPU, and TF32 on a GPU.
    bandwidth: bandwidth of the memory, in GB/s.
    clock: clock of a TPU's cores in GHz, by which the compiler's cycles become
      seconds; 0 if it is not published.
    axes: number of axes of a TPU's topologies; 0 for a GPU.
    cloud: name of the cloud's types of slices, and the number that such a
      name counts for each chip: v5p-8 has four chips.
  """

  gib: float
  bfloat16: float
  float32: float
  bandwidth: float
  clock: float = 0
  axes: int = 0
  cloud: tuple[str, int] = ("", 1)


# Sources: Google Cloud's pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x", which
# has two devices on each chip; NVIDIA's data sheets of the H100 and H200 (SXM)
# and of the DGX B200, without sparsity; targets/*.txtpb for memory.
CHIPS = {
  "v4": Chip(32, 275, 275, 1_228, 1.05, 3, ("v4", 2)),
  "v5e": Chip(16, 197, 197, 819, 1.5, 2, ("v5litepod", 1)),
  "v5p": Chip(95, 459, 459, 2_765, 1.75, 3, ("v5p", 2)),
  "v6e": Chip(32, 918, 918, 1_640, 1.75, 2, ("v6e", 1)),
  "tpu7x": Chip(96, 1_153, 1_153, 3_690, 0, 3, ("tpu7x", 2)),
  "h100": Chip(0.75 * 79.1, 989, 494, 3_352),
  "h200": Chip(0.75 * 141, 989, 494, 4_800),
  "b200": Chip(0.75 * 178.3, 2_250, 1_125, 7_672),
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides what libtpu writes to the file descriptor of standard error.

  It warns about hosts and accelerators that a description does not need.
  """
  sys.stderr.flush()
  kept = os.dup(2)
  try:
    with open(os.devnull, "wb") as nowhere:
      os.dup2(nowhere.fileno(), 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)


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
  chip = CHIPS[kind]
  plugin, install = ("jax_cuda13_plugin", INSTALL_CUDA)
  if chip.axes:
    plugin, install = ("libtpu", INSTALL)
  if importlib.util.find_spec(plugin) is None:
    raise UserError(f"--device {name} needs {plugin}: {install}.")
  from jax.experimental import topologies

  form = _tpus if chip.axes else _gpus
  platform = "tpu" if chip.axes else "cuda"
  written, options = form(kind, shape, slices)
  try:
    with _quiet():
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
