r"""Train steps of every encoder on LRA's tasks, compiled for accelerators.

python -m benchmarks.programs --device v5e:2x2 --out results/programs.jsonl

The command runs `jaxformers compile` for each encoder and task, one after the
other, and appends a record for each; pairs that --out already has are skipped.
No accelerator is needed, but the compiler of the device (see docs/devices.md).
A program takes 10 to 150 seconds on one core, so all of them take some hours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.data import Row
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.models import MODELS
from jaxformers.training import provenance
from jaxformers.training.ahead import Report

# Sizes of the tasks under protocol=jaxformers.
TASKS: dict[str, Row] = {
  "listops": dict(vocab_size=16, max_len=1_999, num_classes=10),
  "text": dict(vocab_size=257, max_len=4_000, num_classes=2),
  "retrieval": dict(vocab_size=257, max_len=4_000, num_classes=2, num_inputs=2),
  "image": dict(vocab_size=257, max_len=1_024, num_classes=10),
  "pathfinder": dict(vocab_size=257, max_len=1_024, num_classes=2),
  "pathx": dict(vocab_size=257, max_len=16_384, num_classes=2),
}
TIMEOUT = 1_800  # Seconds for one config.


def compile_config(config: str, device: str, task: str) -> Row | str:
  """Returns the report of the train step, or the message of a failure.

  Args:
    config: name and arguments of the config.
    device: topology.
    task: name in `TASKS`, for the sizes.
  """
  sizes = ",".join(f"{name}={size}" for name, size in TASKS[task].items())
  command = [sys.executable, "-m", "jaxformers", "compile", config]
  command += ["--device", device, "--sizes", sizes, "--steps=train", "--json"]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
  except subprocess.TimeoutExpired:
    return f"no program after {TIMEOUT} s"
  if done.returncode:
    return (done.stderr.strip().splitlines() or ["failed"])[-1]
  reports: list[Row] = json.loads(done.stdout)
  return reports[0]


def sends(counts: Iterable[tuple[str, int]]) -> str:
  """Returns the collectives of a step in words, from (kind, count) pairs."""
  sent: dict[str, int] = {}
  for kind, count in counts:
    sent[kind] = sent.get(kind, 0) + count
  return ", ".join(f"{n} {kind}" for kind, n in sent.items()) or "nothing"


def figures(report: Row) -> Row:
  """Returns the columns of the table for one step."""
  loops = [n for n in report["loops"] if n > 1]
  return {
    "parts": report["parts"],
    "GiB": round(report["total"], 3),
    "TFLOP": round(report["tflop"], 3),
    "precise": round(report["precise"], 3),
    "library": round(report["library"], 3),
    "GB": round(report["gigabytes"], 2),
    "static ms": round(Report(**report).static_ms, 2),
    "binds": report["binds"],
    "trips": sum(loops),
    "sends": sends((c["kind"], c["count"]) for c in report["collectives"]),
    "s to compile": round(report["seconds"]),
  }


def table_name(device: str, task: str) -> str:
  """Returns the name of the table of the train steps on a device."""
  return f"{device.partition(':')[0]}_{task}_train"


def protocol(device: str) -> str:
  """Returns the protocol of the records of a device."""
  return f"compiled for {device}; nothing runs"


def measure(model: str, task: str, device: str) -> dict[str, Any]:
  """Returns a record of the train step of an encoder on a task."""
  config = f"lra/{task}:model={model}"
  report = compile_config(config, device, task)
  return record(
    table_name(device, task),
    model,
    {"failed": report} if isinstance(report, str) else figures(report),
    config=config,
    protocol=protocol(device),
    hardware=compilers(device),
  )


def record(
  table: str,
  model: str,
  values: Row,
  *,
  config: str,
  protocol: str,
  hardware: str,
  began: float | None = None,
  row: str = "",
  seeds: Sequence[int] = (),
) -> dict[str, Any]:
  """Returns the record of a row, made by this commit.

  Args:
    table: name of the table.
    model: name of the model.
    values: figures by column.
    config, protocol, hardware, seeds: how the figures were measured.
    began: time at which the measurement began, from `time.time`; None for a
      record without minutes.
    row: name of the row; "" for the model.
  """
  return {
    "table": table,
    "row": row or f"`{model}`",
    "model": model,
    "config": config,
    "protocol": protocol,
    "seeds": [*seeds],
    "commit": provenance.commit()[:7],
    "hardware": hardware,
    "minutes": round((time.time() - began) / 60, 1) if began else None,
    "values": values,
  }


def short_commits(commits: str) -> list[str]:
  """Returns the commits in `results.json`, seven characters of each."""
  return [commit[:7] for commit in commits.split(", ")]


def compilers(device: str) -> str:
  """Returns the compiler for a device, with its version."""
  name = "libtpu" if device[0] in "vt" else "jax-cuda13-plugin"
  versions = (f"{k} {metadata.version(k)}" for k in ("jax", name))
  return f"{device}, compiled by {', '.join(versions)}"


# Argument of the commands that append records to a file.
RECORDS = cli.argument(
  "--out",
  type=Path,
  required=True,
  help="file of records, such as results/programs.jsonl",
)


def read(path: Path) -> list[dict[str, Any]]:
  """Returns the records of a file; none if it does not exist."""
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
  """Appends records to a file, a line each."""
  with path.open("a") as file:
    file.writelines(json.dumps(record) + "\n" for record in records)


@cli.command(
  cli.option("device", "v5e:2x2", "topology: v5e:2x2, h100"),
  cli.option("models", ",".join(MODELS), "names: a,b"),
  cli.option("tasks", ",".join(TASKS), "names: a,b"),
  RECORDS,
)
def main(device: str, models: str, tasks: str, out: Path) -> None:
  """Compiles the step of each encoder and task, and appends the records."""
  # Check all names before the first step is compiled.
  for task in cli.names(tasks):
    choose("--tasks name", task, TASKS)
  for model in cli.names(models):
    choose("--models name", model, MODELS)
  for task in cli.names(tasks):
    # Tables of earlier programs end in "_before": they are not made again.
    table = table_name(device, task)
    done = {r["model"]: r["protocol"] for r in read(out) if r["table"] == table}
    if others := {*done.values()} - {protocol(device)}:
      raise UserError(
        f"{out} has {table}, {others.pop()}: give another --out for {device}."
      )
    for model in cli.names(models):
      if model not in done:
        measured = measure(model, task, device)
        append(out, [measured])
        print(task, model, measured["values"], flush=True)


if __name__ == "__main__":
  main()
