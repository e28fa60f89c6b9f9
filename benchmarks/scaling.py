r"""Cost of a train step per device on 1 to 512 devices, and its bottleneck.

python -m benchmarks.scaling --out scaling.json

The command compiles the step of a config for meshes of simulated devices and
runs nothing. FLOPs, bytes read and written, and memory are XLA's counts for one
device. The exchanged bytes are read from the compiled program. Under `strong`
the batch size is constant, and with more devices than rows the sequences are
split. Under `weak` every device has a full batch. `meshes` are other ways to
use eight devices.

The three times assume that one device runs at the peak rates of `--device`. No
device reaches these rates, so the times show the bottleneck of a step, and not
its duration. Programs are compiled for CPUs, for which XLA fuses less, so the
bytes are an upper bound.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import numpy as np

from benchmarks import ours
from benchmarks.data import OUT, report, table
from jaxformers import config as configs
from jaxformers.config import RunConfig
from jaxformers.foundations import cli
from jaxformers.foundations.registry import choose
from jaxformers.training import optim, state, steps
from jaxformers.training.layout import Layout

COUNT = 512  # Number of simulated devices.
MESHES = ("data:8", "fsdp:8", "data:2,model:4", "sequence:8", "data:4,fsdp:2")


# Peak rates of devices, from their data sheets: FLOPs per second of float32
# products at JAX's default precision (TF32 on GPUs, bfloat16 on TPUs), bytes
# per second read and written, and bytes per second sent to neighbours.
RATES = ("products", "memory", "network")
DEVICES = {
  "h100": (494e12, 3.35e12, 450e9),
  "tpu_v4": (275e12, 1.2e12, 150e9),
  "tpu_v5e": (197e12, 0.82e12, 100e9),
}
_COLLECTIVE = re.compile(
  r"= (?P<shapes>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter"
  r"|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(program: str) -> dict[str, tuple[int, float]]:
  """Counts the collectives of a program, and the bytes that a device sends.

  The bytes assume a ring of g devices. An all-reduce sends (g - 1) / g of the
  array twice, a permutation sends the whole array, and the other collectives
  send (g - 1) / g of the array once.

  Args:
    program: text of a compiled program.

  Returns:
    (count, bytes) by kind of collective.
  """
  totals: dict[str, tuple[int, float]] = {}
  for line in program.splitlines():
    match = _COLLECTIVE.search(line)
    if match is None:
      continue
    # Add the bytes of all arrays that the collective returns. The name of a
    # type, such as bf16, contains its bits. Booleans (pred) take one byte.
    size = sum(
      int(bits or 8) // 8 * math.prod(map(int, filter(None, dims.split(","))))
      for bits, dims in re.findall(r"(\d*)\[([\d,]*)\]", match["shapes"])
    )
    # Multiply by the share that a device sends.
    kind, group = match["kind"], group_size(line)
    share = (group - 1) / group
    factor = {
      "all-reduce": 2 * share,
      "collective-permute": 1.0,
      "reduce-scatter": group * share,  # The result is one of g parts.
    }.get(kind, share)
    times, sent = totals.get(kind, (0, 0.0))
    totals[kind] = (times + 1, sent + factor * size)
  return totals


def group_size(line: str) -> int:
  """Returns the number of devices that take part in a collective.

  XLA has four notations of groups: pairs, lists, an array, and a mesh.

  Args:
    line: line of the collective in a compiled program.

  Raises:
    ValueError: if the line has no known notation.
  """
  # Pairs: each pair of a permutation has a sender and a receiver.
  if "collective-permute" in line:
    return 2
  # Lists of devices, {{0,1},{2,3}}: count the devices of the first list.
  if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
    return len(match[1].split(","))
  # An array, [groups,devices]<=[...]: return its second dimension.
  if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
    return int(match[2])
  # A mesh: multiply the sizes of the axes that take part.
  if match := re.search(
    r"replica_groups=\w+\[([^\]]*)\][^{]* \{([^}]*)\}", line
  ):
    axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    over = re.findall(r"'(\w+)'", match[2])
    return math.prod(int(axes[name]) for name in over)
  raise ValueError(f"No groups of devices found in {line.strip()[:200]}")


def compile_step(
  spec: str, mesh: str, count: int, batch: int, length: int
) -> Any:
  """Compiles the train step of a config for several devices.

  Args:
    spec: config with its arguments, such as "path.py:key=value".
    mesh: mesh, as in `config.mesh`.
    count: number of devices.
    batch: number of rows of a batch, over all devices.
    length: number of tokens per row.
  """
  c = RunConfig.from_dict(configs.load(spec))
  # The task Text has the vocabulary of `ours`: 256 bytes and padding.
  model = ours.build(**vars(c.model), length=length)
  tx, _ = optim.build_optimizer(c.optimizer, c.schedule, c.total_steps)
  # Place the step on the mesh, and compile it for the shapes of a batch.
  layout = Layout.of(mesh, jax.devices()[:count])
  static = {"model": model, "tx": tx, "seed": 0, "placement": layout}
  step = functools.partial(steps.train_step, **static)
  create = functools.partial(state.create, model, tx, 0)
  return ours.compile_on_shapes(step, layout, create, batch, length)


def row(program: Any, peaks: tuple[float, ...]) -> dict[str, Any]:
  """Returns a row with the cost of a compiled step, and its bottleneck.

  Args:
    program: compiled step.
    peaks: peak rates of the device, from `DEVICES`.
  """
  # Counts of XLA for one device, and the bytes of the collectives.
  costs, memory = program.cost_analysis(), program.memory_analysis()
  held = memory.temp_size_in_bytes + memory.argument_size_in_bytes
  sent = collectives(program.as_text())
  total = sum(size for _, size in sent.values())
  # Compute the times at peak rates; the longest is the bottleneck.
  amounts = (costs["flops"], costs["bytes accessed"], total)
  seconds = dict(zip(RATES, np.divide(amounts, peaks).tolist(), strict=True))
  return {
    "TFLOP": costs["flops"] / 1e12,
    "GB moved": costs["bytes accessed"] / 1e9,
    "GiB held": held / 2**30,
    "MB sent": total / 1e6,
    "sent by": ", ".join(f"{n} {kind}" for kind, (n, _) in sent.items()) or "-",
    **{f"ms {name}": 1e3 * value for name, value in seconds.items()},
    "bound by": max(seconds, key=seconds.__getitem__),
  }


def plans(batch: int, length: int) -> list[tuple[str, str, int, int]]:
  """Returns the kind, mesh, devices and batch size of every row of the table.

  Args:
    batch: number of rows of a batch.
    length: number of tokens per row. The tokens are split if there are more
      devices than rows.
  """
  counts = [2**k for k in range(COUNT.bit_length())]
  rows = []
  for count in counts:
    # Split the rows first, and split the tokens over the remaining devices.
    data = math.gcd(batch, count)
    left = count // data
    if length % left == 0:
      rows.append(("strong", f"data:{data},sequence:{left}", count, batch))
  # Every device has a full batch, or eight devices use another mesh.
  rows += [("weak", f"data:{count}", count, batch * count) for count in counts]
  rows += [("meshes", mesh, 8, batch) for mesh in MESHES]
  return rows


@cli.command(
  cli.argument("--config", default="configs/lra/text.py", help="path.py"),
  cli.argument("--length", default=4096, help="number of tokens per row"),
  cli.argument("--batch", default=32, help="number of rows per step"),
  cli.argument("--most", default=COUNT, help="largest number of devices"),
  cli.argument("--device", default="h100", help=", ".join(DEVICES)),
  OUT,
)
def main(
  config: str, length: int, batch: int, most: int, device: str, out: str
) -> None:
  """Prints the table, and writes it as JSON if --out is set."""
  # Simulate the devices. The options must be set before JAX starts.
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", COUNT)
  peaks = DEVICES[choose("device", device, DEVICES)]
  rows: list[dict[str, Any]] = []
  for kind, mesh, count, size in plans(batch, length):
    if count > most:
      continue
    program = compile_step(config, mesh, count, size, length)
    counted = row(program, peaks)
    # Compare the work of one device (the first row) with all devices' work.
    single = rows[0]["TFLOP"] if rows else counted["TFLOP"]
    share = single * size / batch / (count * counted["TFLOP"])
    rows.append(
      {"scaling": kind, "devices": count, "mesh": mesh, "batch": size}
      | counted
      | {"of one device's work": share}
    )
    # Print the row now: the complete table is printed at the end.
    print(table(rows[-1:]).splitlines()[-1], flush=True)
  print(f"\n{config}, n = {length}, peak rates of {device}")
  report([("scaling", rows)], out)


if __name__ == "__main__":
  main()
