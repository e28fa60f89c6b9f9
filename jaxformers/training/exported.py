"""Folders of exported models: written as a whole, and verified when read.

`TrainedModel.save` and `jaxformers export` write them. model.json
holds a digest of every other file; see `digests`.
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
# Error codes of a folder that cannot be renamed.
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EROFS)
_REMEDY = "Copy the folder again, or export the run again."


def is_exported(folder: Path) -> bool:
  """Returns True if a folder holds the parameters of an exported model."""
  return (folder / PARAMETERS).is_file()


def read_record(folder: Path) -> bytes:
  """Returns the bytes of model.json; b"" if there is none.

  Every save writes different bytes.

  Raises:
    OSError: if model.json cannot be read.
  """
  path = folder / RECORD
  try:
    return path.read_bytes() if path.is_file() else b""
  except FileNotFoundError:
    return b""


@contextlib.contextmanager
def writing(folder: Path, content: Mapping[str, Any]) -> Iterator[Path]:
  """Yields a new folder to write files to, which then replaces `folder`.

  See `durable.new_folder`.

  Args:
    folder: folder of the model; it must be missing, empty or an exported model.
    content: content of model.json, without the digests.

  Raises:
    UserError: if the folder holds other files, or if it cannot be replaced, for
      example because a disk is mounted there.
  """
  _require_own(folder)
  # Write into a new folder, and replace the old one when it is complete.
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
  """Raises UserError if replacing a folder would delete other files."""
  if not folder.exists():
    return
  if not folder.is_dir() or Path.cwd().is_relative_to(folder.resolve()):
    raise UserError(f"{folder} cannot be replaced: give a new folder.")
  # model.json lists the files that were written with it.
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
  """Writes the parameters of a model, for `read_export`."""
  write_arrays(
    folder / PARAMETERS,
    flax.traverse_util.flatten_dict(jax.device_get(params), sep="/"),
  )


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
  """Writes arrays by their names as a safetensors file."""
  flat = {name: np.asarray(leaf, order="C") for name, leaf in arrays.items()}
  # `save_file` creates files that other users cannot read.
  path.write_bytes(safetensors.numpy.save(flat))


def read_export(folder: Path) -> tuple[dict[str, Any], Any, frozenset[str]]:
  """Reads an exported model, and verifies the digests of all of its files.

  Returns:
    The content of model.json, the parameters, and the names of all files.

  Raises:
    UserError: if the folder is damaged.
  """
  # Verify the digests of all files.
  content, files = digests.verify(folder, RECORD, _REMEDY)
  if {PARAMETERS, "vocabulary.json"} - files.keys():
    raise UserError(f"{folder} is not an exported model. {_REMEDY}")
  # Check the fields of model.json.
  for field, kind in FIELDS.items():
    if not isinstance(content.get(field), kind):
      raise UserError(
        f"{folder / RECORD} has {field}={content.get(field)!r:.40}. {_REMEDY}"
      )
  # Read the parameters.
  try:
    flat = safetensors.numpy.load_file(folder / PARAMETERS)
  except (safetensors.SafetensorError, OSError, KeyError) as error:
    raise UserError(
      f"{folder / PARAMETERS} cannot be read ({error}). {_REMEDY}"
    ) from None
  params = flax.traverse_util.unflatten_dict(flat, sep="/")
  return content, params, frozenset(files)
