"""Descriptions of accelerators, for which JAX compiles without having them.

libtpu compiles for the description of a TPU topology on any x86 machine. It
needs no TPU and no driver.
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
from typing import Any

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

INSTALL = "pip install -e '.[aot]'"
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
    gib: memory, in GiB.
    tflops: dense products in bfloat16, in TFLOP/s.
    bandwidth: bandwidth of the memory, in GB/s.
    clock: clock of the cores in GHz, by which the compiler's cycles become
      seconds.
  """

  gib: float
  tflops: float
  bandwidth: float
  clock: float


# Source: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e.
CHIPS = {
  "v4": Chip(32, 275, 1_228, 1.05),
  "v5e": Chip(16, 197, 819, 1.5),
  "v5p": Chip(95, 459, 2_765, 1.75),
  "v6e": Chip(32, 918, 1_640, 1.75),
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
  """Returns the kind and the shape of a topology such as "v5e:4x4".

  Raises:
    UserError: for an unknown kind, or a shape that is not a product of numbers.
  """
  kind, _, shape = name.partition(":")
  choose("device", kind, CHIPS)
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
    raise UserError(
      f"--device {name}: {shape!r} is not the shape of a topology. Write "
      f"{kind}:2x2, for example."
    )
  return kind, tuple(map(int, shape.split("x")))


def describe_devices(name: str, slices: int = 1) -> Sequence[Any]:
  """Returns the devices of a topology, of which a mesh can be made.

  Args:
    name: kind and shape of a slice, such as "v5e:4x4".
    slices: number of slices, which are connected by the data center's network.

  Raises:
    UserError: for an unknown topology, or without libtpu.
  """
  kind, shape = read_name(name)
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(f"--device {name} needs libtpu: {INSTALL}.")
  for variable, value in ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  from jax.experimental import topologies

  # v4 and v5p have three axes.
  axes = (*shape, 1) if kind in ("v4", "v5p") and len(shape) == 2 else shape
  written = f"{kind}:{'x'.join(map(str, axes))}"
  options: dict[str, Any] = {}
  # The two cores of a v4 chip work as one device.
  if kind == "v4":
    options["chip_config_name"] = "megacore"
  # A host has several chips, unless the slice is a single one.
  if math.prod(axes) == 1:
    options["chips_per_host_bounds"] = [1, 1, 1]
  try:
    with _quiet():
      topology = topologies.get_topology_desc(
        written, platform="tpu", num_slices=slices, **options
      )
  except Exception as error:  # The plugin raises errors of several kinds.
    raise UserError(
      f"The TPU compiler cannot describe --device {name}: {error}. Shapes that "
      "exist are v5e:1x1, v5e:4x4 and v5p:2x2x1, for example."
    ) from error
  return topology.devices
