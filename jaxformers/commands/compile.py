r"""Compiles the steps of a config for TPUs or GPUs that this machine lacks.

jaxformers compile lra/listops:model=transject --device v5e:2x2
jaxformers compile lra/text:model=s5 --device v5e:4x4 --slices 2 \
    --sizes vocab_size=257,max_len=4000,num_classes=2 --config.mesh=data:32

The real compiler plans the memory of each device. A step that does not fit is
computed in more parts of its batch. Operations, bytes and the compiler's cycles
are counted with the bodies of loops times their trips. "compiler ms" is the
compiler's own estimate, or 0 if it has none; "compute ms" and "memory ms" are
the operations and the bytes at the published peaks of the device. Products of
float32 at the highest precision ("TFLOP, precise") are slower: a TPU takes six
passes of bfloat16, and a GPU uses no tensor cores. Where the compiler has no
kernel for a product on a GPU, a library computes products ("TFLOP, library").

--sizes gives the sizes of the task; without it the data are prepared. --out
writes the train step to a file. A run on such devices with the same config and
--config.program=FILE starts without compiling it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxformers import config as configs
from jaxformers.analysis.tables import costs
from jaxformers.config import RunConfig, arguments
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.foundations.tables import markdown_table
from jaxformers.training import origin, topologies
from jaxformers.training.ahead import Ahead, Report

# Columns of the table of steps, each with the format of a `Report`.
COLUMNS = {
  "step": "{0.step}",
  "parts": "{0.parts}",
  "GiB, arguments": "{0.arguments:.3f}",
  "GiB, temporary": "{0.temporaries:.3f}",
  "GiB, total": "{0.total:.3f}",
  "GiB, device": "{0.available:g}",
  "TFLOP": "{0.tflop:.3f}",
  "TFLOP, precise": "{0.precise:.3f}",
  "TFLOP, library": "{0.library:.3f}",
  "GB": "{0.gigabytes:.2f}",
  "compiler ms": "{0.compiler_ms:.2f}",
  "compute ms": "{0.compute_ms:.2f}",
  "memory ms": "{0.memory_ms:.2f}",
  "binds": "{0.binds}",
  "s to compile": "{0.seconds:.0f}",
}
STEPS = ("train", "evaluation")
SENT = ("step", "collective", "group", "crosses slices", "count", "MB")


def table(reports: Sequence[Report]) -> str:
  """Returns the tables of steps and of their communication, in Markdown."""
  rows = [[form.format(r) for form in COLUMNS.values()] for r in reports]
  parts = [markdown_table(tuple(COLUMNS), rows)]
  parts += [
    f"{report.step}: a loop whose number of trips is not in the program is "
    "counted once."
    for report in reports
    if 0 in report.loops
  ]
  sent = [
    (
      report.step,
      each.kind,
      str(each.group),
      "yes" if each.crosses_slices else "no",
      str(each.count),
      f"{each.bytes / 1e6:,.1f}",
    )
    for report in reports
    for each in report.collectives
  ]
  if sent:
    parts.append(markdown_table(SENT, sent))
  return "\n\n".join(parts)


@cli.command(
  cli.argument("config", help="name or path.py:key=value,..."),
  cli.option("device", "v5e:2x2", "v5e:4x4, v5litepod-16, h100:8, ..."),
  cli.argument("--slices", type=int, default=1, help="number of slices"),
  cli.option("sizes", "", "sizes of the task, such as vocab_size=257,..."),
  cli.option("steps", ",".join(STEPS), "steps to compile: train,evaluation"),
  cli.option("out", "", "file for the train step, for config.program"),
  cli.JSON,
  takes_overrides=True,
)
def main(
  config: str,
  device: str,
  slices: int,
  sizes: str,
  steps: str,
  out: str,
  as_json: bool,
  overrides: Sequence[str],
) -> None:
  """Prints what the compiler plans for the train and evaluation steps."""
  names = [choose("--steps", name, STEPS) for name in steps.split(",")]
  if out and "train" not in names:
    raise UserError(f"--out={out} has the train step: add it to --steps.")
  if slices < 1:
    raise UserError(f"--slices={slices}: give a number of at least 1.")
  kind, _ = topologies.read_name(device)
  # Pretrained weights determine fields that the user has not chosen.
  fields = configs.complete(configs.load_with(config, overrides))
  chosen = arguments.values_of(overrides)
  loaded = RunConfig.from_dict(origin.take_fields(fields, None, chosen))
  # A step is saved only where a run could load it.
  loaded = dataclasses.replace(loaded, program=out)
  # Small arrays are made on this machine, which need not have a TPU.
  jax.config.update("jax_platforms", "cpu")
  devices = topologies.describe_devices(device, slices)
  task_sizes = costs.parse_sizes(sizes) if sizes else None
  ahead = Ahead(loaded, devices, topologies.CHIPS[kind], task_sizes)
  reports: list[Report] = []
  try:
    for name in names:
      reports.append(getattr(ahead, name)())
      if name == "train" and out:
        ahead.save(out)
  # Show the train step also if the evaluation step does not fit.
  finally:
    if reports:
      title = f"{len(devices)} devices of {device}, {slices} slice(s):\n"
      content = [dataclasses.asdict(report) for report in reports]
      cli.show(content, (title, table(reports)), as_json)


if __name__ == "__main__":
  main()
