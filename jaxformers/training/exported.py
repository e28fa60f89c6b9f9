"""Folders of trained models: written as a whole, and verified when read.

`TrainedModel.save` and `python -m jaxformers export` write them. model.json has
a digest of every other file; see `digests`.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxformers.data.engine import digests
from jaxformers.foundations import durable
from jaxformers.foundations.errors import UserError

RECORD = "model.json"
PARAMETERS = "parameters.safetensors"
# Fields of model.json that are read, with their types.
FIELDS = {"model": Mapping, "task": Mapping, "step": int, "imports": str}
# Codes of a folder that cannot be renamed.
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EROFS)
_REMEDY = "Copy the folder again, or write it again from the run."


def is_exported(folder: Path) -> bool:
  """Returns True if a folder has the parameters of an exported model."""
  return (folder / PARAMETERS).is_file()


def read_record(folder: Path) -> bytes:
  """Returns the bytes of model.json, which differ for each save; b"" if none.

  Raises:
    OSError: if it cannot be read.
  """
  path = folder / RECORD
  try:
    return path.read_bytes() if path.is_file() else b""
  except FileNotFoundError:
    return b""


@contextlib.contextmanager
def writing(folder: Path, content: Mapping[str, Any]) -> Iterator[Path]:
  """Yields a folder to write files to, which takes the place of `folder`.

  See `durable.new_folder`.

  Args:
    folder: folder of the model; missing, empty or one that was written here.
    content: content of model.json.

  Raises:
    UserError: for a folder with files that were not written here, or one that
      cannot be replaced, such as the place where a disk is mounted.
  """
  _require_own(folder)
  try:
    with durable.new_folder(folder) as staged:
      yield staged
      digests.seal(staged, RECORD, content)
  except OSError as error:
    if error.errno not in _FIXED:
      raise
    raise UserError(
      f"{folder} cannot be replaced as a whole ({error.strerror}): give a "
      f"folder inside of it, such as {folder / 'model'}."
    ) from None


def _require_own(folder: Path) -> None:
  """Raises UserError for a folder that would lose files of somebody else."""
  if not folder.exists():
    return
  if not folder.is_dir() or Path.cwd().is_relative_to(folder.resolve()):
    raise UserError(f"{folder} cannot be replaced: give a new folder.")
  try:
    record = json.loads((folder / RECORD).read_bytes())
    written = {RECORD, *record["digests"]}
  except (OSError, ValueError, RecursionError, KeyError, TypeError):
    written = set()
  if others := sorted({path.name for path in folder.iterdir()} - written):
    raise UserError(
      f"{folder} holds other files, which would be lost, such as "
      f"{others[0]!r}: give a new folder."
    )


def write_parameters(folder: Path, params: Any) -> None:
  """Writes the parameters of a model, for `read_export` to find them."""
  write_arrays(
    folder / PARAMETERS,
    flax.traverse_util.flatten_dict(jax.device_get(params), sep="/"),
  )


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
  """Writes arrays by their names as a safetensors file."""
  flat = {name: np.asarray(leaf, order="C") for name, leaf in arrays.items()}
  # `save_file` makes files that nobody else can read.
  path.write_bytes(safetensors.numpy.save(flat))


def read_export(folder: Path) -> tuple[dict[str, Any], Any, frozenset[str]]:
  """Reads a folder, and compares all of its files with their digests.

  Returns:
    The content of model.json, the parameters, and the names of all files.

  Raises:
    UserError: for a damaged folder.
  """
  content, files = digests.verify(folder, RECORD, _REMEDY)
  if {PARAMETERS, "vocabulary.json"} - files.keys():
    raise UserError(f"{folder} is no exported model. {_REMEDY}")
  for field, kind in FIELDS.items():
    if not isinstance(content.get(field), kind):
      raise UserError(
        f"{folder / RECORD} has {field}={content.get(field)!r:.40}. {_REMEDY}"
      )
  try:
    flat = safetensors.numpy.load_file(folder / PARAMETERS)
  except (safetensors.SafetensorError, OSError, KeyError) as error:
    raise UserError(
      f"{folder / PARAMETERS} cannot be read ({error}). {_REMEDY}"
    ) from None
  params = flax.traverse_util.unflatten_dict(flat, sep="/")
  return content, params, frozenset(files)
