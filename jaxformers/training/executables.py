"""Compiled train steps in a file, with which a run starts without compiling.

`jaxformers compile` writes the file with --out, and `config.program` names it.
A program is a pickle of JAX, which may run code: load only files of your own.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxformers.config import RunConfig, differences, plain
from jaxformers.foundations import paths, platforms
from jaxformers.foundations.errors import UserError
from jaxformers.models import Model
from jaxformers.training import provenance
from jaxformers.training.layout import Layout

# Fields on which the program of a train step depends, besides the model and the
# parts of a batch.
FIELDS = (
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
# Packages of the compilers, by the platforms of their devices.
COMPILERS = {"tpu": ["libtpu"], "gpu": ["jax-cuda13-pjrt"]}
# Variables with flags of the compilers, and flags that are not compared:
# `compile` sets the first one for GPUs, which it cannot measure, JAX sets the
# second one on machines with TPUs, and the others change no program.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
NOT_COMPARED = (
  "--xla_gpu_autotune_level=0",
  "--xla_tpu_use_enhanced_launch_barrier=true",
  "--xla_dump_",
  "--xla_force_host_platform_device_count",
)
FACTS = "facts.json"
# Settings of JAX that change a program.
SETTINGS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_enable_x64",
  "jax_threefry_partitionable",
)


class UnfitError(Exception):
  """The programs of a file do not fit a run; the message says why."""


def batch_key(batch: Mapping[str, Any]) -> str:
  """Returns the types of a batch, by which compiled programs differ."""
  types = (f"{k} {x.dtype}{[*x.shape]}" for k, x in sorted(batch.items()))
  return ", ".join(types)


def describe(config: RunConfig, model: Model, layout: Layout) -> dict[str, Any]:
  """Returns what the programs of a config depend on, as plain JSON."""
  devices = layout.mesh.devices.ravel().tolist()
  compilers = COMPILERS.get(platforms.backend_of(devices[0]), [])
  names = ["jax", "jaxlib", "flax", "optax", *compilers]
  fields = config.as_dict()
  flags = [flag for name in FLAGS for flag in os.environ.get(name, "").split()]
  return plain(
    {
      "versions": {name: _version(name) for name in names},
      "settings": {name: getattr(jax.config, name) for name in SETTINGS},
      "flags": [f for f in flags if not f.startswith(NOT_COMPARED)],
      "code": provenance.code_digest(),
      "device": devices[0].device_kind,
      "mesh": layout.mesh.shape,
      # Slice and position of every device of a TPU.
      "topology": [
        (getattr(d, "slice_index", 0), getattr(d, "coords", ()))
        for d in devices
      ],
      # With the sizes of the task; without a padded length, its default.
      "model": model.config.as_dict()
      | {"padded_len": model.config.padded_len or model.config.num_tokens},
      "config": {name: fields[name] for name in FIELDS},
    }
  )


def _version(name: str) -> str:
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return ""


def save(
  path: str | Path,
  facts: Mapping[str, Any],
  parts: int,
  programs: Mapping[str, Any],
) -> None:
  """Writes compiled programs to a file.

  Args:
    path: file to write; its folder is made.
    facts: result of `describe`.
    parts: number of parts of a batch.
    programs: compiled programs, by the `batch_key` of their batches.
  """
  header = {"facts": facts, "parts": parts, "batches": list(programs)}
  path = paths.expand(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr(FACTS, json.dumps(header))
    for number, program in enumerate(programs.values()):
      payload, _, _ = serialize_executable.serialize(program)
      file.writestr(str(number), payload)


def load(
  path: str | Path, facts: Mapping[str, Any], step: Any, state: Any, batch: Any
) -> tuple[int, dict[str, Any]]:
  """Returns the number of parts and the programs of a file.

  Args:
    path: file from `save`.
    facts: result of `describe` for this run.
    step: compiled step, of which only the structure of its results is taken.
    state: state of the run, on its devices.
    batch: a batch of the run, on its devices.

  Raises:
    UnfitError: if the programs are for another run or other batches, or cannot
      be loaded on these devices.
    UserError: if there is no such file, or if it holds no programs.
  """
  try:
    with zipfile.ZipFile(paths.expand(path)) as file:
      header = json.loads(file.read(FACTS))
      if differing := differences(header["facts"], facts):
        raise UnfitError(f"this run differs from it in {differing[0]}")
      if (key := batch_key(batch)) not in header["batches"]:
        raise UnfitError(
          f"its batches are {'; '.join(header['batches'])}, and this run has "
          f"{key}"
        )
      payloads = [file.read(str(k)) for k in range(len(header["batches"]))]
  except (
    OSError,
    KeyError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise UserError(
      f"config.program={str(path)!r}: {error}. Give a file of `jaxformers "
      "compile --out`, or remove the field."
    ) from error
  inside = jax.tree.structure(((state, batch), {}))
  outside = jax.tree.structure(jax.eval_shape(step, state, batch))
  devices = jax.tree.leaves(state)[0].sharding.mesh.devices.ravel().tolist()
  programs = {}
  for key, payload in zip(header["batches"], payloads, strict=True):
    try:
      programs[key] = serialize_executable.deserialize_and_load(
        payload, inside, outside, execution_devices=devices
      )
    except (jax.errors.JaxRuntimeError, KeyError, ValueError) as error:
      raise UnfitError(f"it cannot be loaded: {error}") from error
  return header["parts"], programs
