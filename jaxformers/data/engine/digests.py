"""Digests that detect damaged files.

A sealed folder has a record: a JSON file with the digests of all other files
and the digest of the record's content. Digests are 128-bit XXH3 hashes: they
detect accidents, such as flipped bits and cut files, but not forgery.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxformers.foundations import durable
from jaxformers.foundations.errors import UserError

BLOCK = 1 << 20  # Bytes read at a time; larger blocks do not fit the cache.


def of_file(path: Path) -> str:
  """Returns the digest of a file's bytes, 32 hexadecimal digits."""
  digest = xxhash.xxh3_128()
  block = memoryview(bytearray(BLOCK))
  with path.open("rb", buffering=0) as file:
    while size := file.readinto(block):
      digest.update(block[:size])
  return digest.hexdigest()


def of_array(array: np.ndarray) -> str:
  """Returns the digest of the file that `np.save` would write for an array."""
  array = np.ascontiguousarray(array)
  # Hash NumPy's header, which holds type and shape, and then the data.
  header = io.BytesIO()
  fields = np.lib.format.header_data_from_array_1_0(array)
  np.lib.format.write_array_header_1_0(header, fields)
  digest = xxhash.xxh3_128(header.getvalue())
  digest.update(array.data if array.size else b"")
  return digest.hexdigest()


def of_parts(*parts: str | np.ndarray) -> str:
  """Returns one digest of texts and arrays, including types and shapes."""
  return _of_json([p if isinstance(p, str) else of_array(p) for p in parts])


def _of_json(content: Any) -> str:
  # Sort the keys: the order of a dictionary must not change its digest.
  text = json.dumps(content, sort_keys=True)
  return xxhash.xxh3_128_hexdigest(text.encode())


def seal(folder: Path, name: str, content: Mapping[str, Any]) -> None:
  """Writes the record of a folder whose other files are complete.

  The record has the fields of `content`, and two more: `digests` maps the names
  of all other files to their digests; `digest` is the digest of all fields of
  the record except `digest`.

  Args:
    folder: folder whose files never change afterwards.
    name: file name of the record.
    content: fields of the record besides `digests` and `digest`.
  """
  # Digest every file below the folder.
  files = {
    path.relative_to(folder).as_posix(): of_file(path)
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }
  # Digest the content as JSON reads it back: tuples have become lists.
  record = json.loads(json.dumps({**content, "digests": files}))
  durable.write_json(folder / name, {**record, "digest": _of_json(record)})


# Default remedy of `verify`, for folders of prepared data.
PREPARED = "Remove {folder} and run again: the data are prepared again."


def verify(
  folder: Path, name: str, remedy: str = PREPARED
) -> tuple[dict[str, Any], dict[str, str]]:
  """Compares all files of a sealed folder with their digests.

  Args:
    folder: folder that `seal` has sealed.
    name: file name of the record.
    remedy: last sentence of the error message, a template with {folder}.

  Returns:
    The `content` that was passed to `seal`, and the digests of the files.

  Raises:
    UserError: for a missing or damaged file, with the remedy.
  """
  file = name
  try:
    # Verify the record first: it holds the digests of the other files.
    record = _read(folder / name)
    is_intact = record.pop("digest", None) == _of_json(record)
    files = record.pop("digests", None)
    if not is_intact or not isinstance(files, dict):
      raise _Damage("differs from its digest")
    # Then verify every file.
    for file, digest in files.items():
      # The record may come from others: never read outside of the folder.
      if Path(file).is_absolute() or ".." in Path(file).parts:
        raise _Damage("is not in this folder")
      if not (folder / file).is_file():
        raise _Damage("is missing")
      if of_file(folder / file) != digest:
        raise _Damage("differs from its digest")
  except (_Damage, *_MISSING) as error:
    problem = error if isinstance(error, _Damage) else "is missing"
    raise UserError(
      f"The folder is damaged: {folder / file} {problem}. "
      f"{remedy.format(folder=folder)}"
    ) from None
  return record, files


# Errors that mean a damaged folder. Other errors, such as a time-out of the
# file system, are not caught.
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class _Damage(Exception):
  """Damage of a file; the message completes the sentence "FILE ..."."""


def _read(path: Path) -> dict[str, Any]:
  try:
    record = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise _Damage(f"cannot be read ({error})") from None
  if not isinstance(record, dict):
    raise _Damage(f"holds no JSON object but {record!r:.40}")
  return record
