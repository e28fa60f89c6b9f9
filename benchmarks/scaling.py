r"""Train steps on 4 to 256 chips of TPU v5e, compiled by the real compiler.

python -m benchmarks.scaling --out results/scaling.jsonl

The command compiles the train step of a config for each number of chips, and
runs nothing. In `weak` every chip has 8 rows; in `strong` the batch has 256
rows; `meshes` are ways to use 16 chips; `limits` doubles the length or the
width until 256 chips cannot hold the step. Records that --out has are skipped.

The static time of a step is the longest of the compiler's own time, the
products and the bytes at their peaks. It is added to the time to communicate
at the peak rate, as if they never overlap. No chip reaches these rates, so the
times show what limits a step, and not how long it takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import programs
from benchmarks.data import Row
from benchmarks.programs import RECORDS, append, compilers, read, sends
from jaxformers import config as configs
from jaxformers.config import RunConfig
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.training import topologies
from jaxformers.training.ahead import Ahead, Report

MODELS = ("transject", "transformer", "s5")
LENGTH = 2_048  # Tokens of a row: ListOps, rounded up to split evenly.
SLICE = "v5e:4x4"
POD = "v5e:16x16"
SLICES = {4: "v5e:2x2", 16: SLICE, 64: "v5e:8x8", 256: POD}
# Google Cloud, "TPU v5e": 1,600 Gbps between the chips of a slice, and 6.4 Tbps
# of 256 chips between slices; in bytes per second of one chip.
BETWEEN_CHIPS = 200e9
BETWEEN_SLICES = 3.1e9
RECOMPUTED = "--config.model.memory=recomputed"


class Step(NamedTuple):
  """A train step to compile.

  Attributes:
    table: table of the record.
    model: name of the encoder.
    device: topology of a slice.
    slices: number of slices.
    mesh: mesh, as in `config.mesh`.
    batch: number of rows, over all chips.
    length: number of tokens of a row.
    overrides: other overrides of the config.
  """

  table: str
  model: str
  device: str
  slices: int
  mesh: str
  batch: int
  length: int = LENGTH
  overrides: tuple[str, ...] = ()

  @property
  def chips(self) -> int:
    """Number of chips."""
    _, shape = topologies.read_name(self.device)
    return self.slices * math.prod(shape)

  @property
  def row(self) -> str:
    """Name of the row in the table."""
    parts = [f"`{self.model}`", f"`{self.mesh}`"]
    if self.slices > 1:
      parts.append(f"{self.slices} slices")
    parts += [name.rpartition(".")[2] for name in self.overrides[:1]]
    if self.length != LENGTH:
      parts.append(f"{self.length:,} tokens")
    return ", ".join(parts)

  def compile(self) -> tuple[Report, int]:
    """Compiles the step; returns its report and the number of parameters.

    Raises:
      UserError: if it does not fit.
    """
    overrides = [
      f"--config.mesh={self.mesh}",
      f"--config.batch_size={self.batch}",
      *self.overrides,
    ]
    spec = f"lra/listops:model={self.model}"
    config = RunConfig.from_dict(configs.load_with(spec, overrides))
    devices = topologies.describe_devices(self.device, self.slices)
    sizes = programs.TASKS["listops"] | {"max_len": self.length}
    ahead = Ahead(config, devices, topologies.CHIPS["v5e"], sizes)
    parameters = sum(x.size for x in jax.tree.leaves(ahead.state.params))
    return ahead.train(), parameters


def plans(model: str) -> Iterator[Step]:
  """Yields the steps of the tables `weak`, `strong` and `meshes`."""
  for chips, device in SLICES.items():
    yield Step("weak", model, device, 1, f"data:{chips}", 8 * chips)
  for slices in (2, 4):
    chips = 16 * slices
    yield Step("weak", model, SLICE, slices, f"data:{chips}", 8 * chips)
  for chips, device in SLICES.items():
    yield Step("strong", model, device, 1, f"data:{chips}", 256)
  meshes = ("data:16", "fsdp:16", "data:8,model:2", "data:4,model:4")
  for mesh in (*meshes, "data:4,sequence:4"):
    yield Step("meshes", model, SLICE, 1, mesh, 128)


def limits(model: str) -> Iterator[Step]:
  """Yields steps for 256 chips that grow in length or in width.

  The caller stops a series when a step does not fit.
  """
  kept = (RECOMPUTED,)
  for power in range(17, 25):
    sizes = (model, POD, 1, "sequence:256", 1, 2**power, kept)
    yield Step("longest", *sizes)
  for power in range(11, 17):
    wide = (f"--config.model.d_model={2**power}", RECOMPUTED)
    yield Step("largest", model, POD, 1, "fsdp:256", 256, LENGTH, wide)


def network_ms(report: Report) -> float:
  """Returns the time to communicate at the peak rate, in milliseconds.

  A ring of g devices, or of g slices, is assumed: an all-reduce sends
  (g - 1) / g of the array twice, a permutation sends it once, and the other
  kinds send (g - 1) / g of the whole array.
  """
  seconds = 0.0
  for each in report.collectives:
    share = (each.group - 1) / each.group
    factor = {
      "all-reduce": 2 * share,
      "collective-permute": 1.0,
      "reduce-scatter": each.group * share,  # The result is one of g parts.
    }.get(each.kind, share)
    rate = BETWEEN_SLICES if each.crosses_slices else BETWEEN_CHIPS
    seconds += factor * each.bytes / rate
  return 1e3 * seconds


def figures(step: Step, report: Report, parameters: int) -> Row:
  """Returns the columns of the table for a step."""
  network = network_ms(report)
  times = {report.binds: report.static_ms, "network": network}
  crossing = [x.bytes for x in report.collectives if x.crosses_slices]
  return {
    "chips": step.chips,
    "rows": step.batch,
    "million parameters": round(parameters / 1e6, 2),
    "parts": report.parts,
    "GiB": round(report.total, 3),
    "TFLOP": round(report.tflop, 3),
    "precise": round(report.precise, 3),
    "GB": round(report.gigabytes, 2),
    "MB in collectives": round(
      sum(c.bytes for c in report.collectives) / 1e6, 1
    ),
    "MB across slices": round(sum(crossing) / 1e6, 1),
    "collectives": sends([(c.kind, c.count) for c in report.collectives]),
    "static ms": round(report.static_ms, 2),
    "network ms": round(network, 2),
    "binds": max(times, key=times.__getitem__),
    "rows per s and chip": round(
      1e3 * step.batch / step.chips / (report.static_ms + network), 1
    ),
  }


def record(step: Step) -> tuple[dict[str, Any], bool]:
  """Returns the record of a step, and whether it fits."""
  began = time.time()
  try:
    values, fits = figures(step, *step.compile()), True
  except (UserError, jax.errors.JaxRuntimeError) as error:
    values, fits = {"chips": step.chips, "failed": str(error)[:120]}, False
  row = programs.record(
    step.table,
    step.model,
    values,
    config=f"lra/listops:model={step.model}",
    protocol=f"{step.batch} rows of {step.length} tokens; nothing runs",
    hardware=compilers("v5e"),
    began=began,
    row=step.row,
  )
  return row, fits


@cli.command(
  cli.option("models", ",".join(MODELS), "names: a,b"),
  RECORDS,
)
def main(models: str, out: Path) -> None:
  """Compiles the steps, and appends a record for each."""
  jax.config.update("jax_platforms", "cpu")
  done = {
    (r["table"], r["row"], r["values"]["chips"]): "failed" not in r["values"]
    for r in read(out)
  }
  for model in cli.names(models):
    full: set[str] = set()  # Series that do not fit any more.
    for step in (*plans(model), *limits(model)):
      key = (step.table, step.row, step.chips)
      if step.table in full:
        continue
      if key in done:
        fits = done[key]
      else:
        row, fits = record(step)
        append(out, [row])
        print(*key, row["values"], flush=True)
      if not fits and step.table in ("longest", "largest"):
        full.add(step.table)


if __name__ == "__main__":
  main()
