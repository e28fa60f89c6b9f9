"""Compiled train steps in a file, with which a run starts without compiling.

`jaxformers compile` writes the file with --out, and `config.program` names it.
A program is a pickle of JAX, which may run code: load only files of your own.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxformers.config import RunConfig
from jaxformers.foundations.errors import UserError
from jaxformers.training import provenance
from jaxformers.training.layout import Layout

# Fields on which the program of a train step depends, besides its parts.
FIELDS = (
  "model",
  "optimizer",
  "schedule",
  "total_steps",
  "batch_size",
  "label_smoothing",
  "margin_tokens",
  "margin_weight",
  "margin_loss",
  "seed",
  "ema_decay",
)
FACTS = "facts.json"
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def batch_key(batch: Mapping[str, Any]) -> Shapes:
  """Returns the shapes of a batch, by which compiled programs differ."""
  return tuple((name, tuple(x.shape)) for name, x in sorted(batch.items()))


def describe(config: RunConfig, layout: Layout) -> dict[str, Any]:
  """Returns what the programs of a config depend on, as plain JSON."""
  device = layout.mesh.devices.flat[0]
  names = ["jax", "jaxlib"] + ["libtpu"] * (device.platform == "tpu")
  fields = config.as_dict()
  described = {
    "versions": {name: metadata.version(name) for name in names},
    "code": provenance.code_digest(),
    "device": device.device_kind,
    "mesh": dict(layout.mesh.shape),
    "config": {name: fields[name] for name in FIELDS},
  }
  plain: dict[str, Any] = json.loads(json.dumps(described))
  return plain


def save(
  path: str | Path,
  facts: Mapping[str, Any],
  parts: int,
  programs: Mapping[Shapes, Any],
) -> None:
  """Writes compiled programs to a file.

  Args:
    path: file to write.
    facts: result of `describe`.
    parts: number of parts of a batch.
    programs: compiled programs, by the shapes of their batches.
  """
  header = {"facts": facts, "parts": parts, "shapes": list(programs)}
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr(FACTS, json.dumps(header))
    for number, program in enumerate(programs.values()):
      payload, _, _ = serialize_executable.serialize(program)
      file.writestr(str(number), payload)


def load(
  path: str | Path, facts: Mapping[str, Any], step: Any, state: Any, batch: Any
) -> tuple[int, dict[Shapes, Any]] | str:
  """Returns the parts and the programs of a file, or why they do not fit.

  Args:
    path: file from `save`.
    facts: result of `describe` for this run.
    step: compiled step, of which only the structure of its results is taken.
    state: state of the run, on its devices.
    batch: a batch of the run, on its devices.

  Raises:
    UserError: if there is no such file, or if it holds no programs.
  """
  try:
    with zipfile.ZipFile(path) as file:
      header = json.loads(file.read(FACTS))
      payloads = [file.read(str(k)) for k in range(len(header["shapes"]))]
  except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
    raise UserError(
      f"config.program={str(path)!r}: {error}. Give a file of `jaxformers "
      "compile --out`, or remove the field."
    ) from error
  # Name the first fact that differs.
  for name, value in facts.items():
    saved = header["facts"].get(name)
    if saved != value:
      return f"its {name} is {saved}, and this run has {value}"
  inside = jax.tree.structure(((state, batch), {}))
  outside = jax.tree.structure(jax.eval_shape(step, state, batch))
  devices = jax.tree.leaves(state)[0].sharding.mesh.devices.ravel().tolist()
  programs = {}
  for shapes, payload in zip(header["shapes"], payloads, strict=True):
    key = tuple((name, tuple(shape)) for name, shape in shapes)
    programs[key] = serialize_executable.deserialize_and_load(
      payload, inside, outside, execution_devices=devices
    )
  return header["parts"], programs
