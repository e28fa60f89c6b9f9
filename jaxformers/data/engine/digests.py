"""Digests by which damaged data is told from what was written.

A sealed folder has a record, a JSON file with the digests of all its other
files and one of itself. They are XXH3 hashes of 128 bits: they detect
accidents, such as flipped bits and cut files, and do not protect from forgery.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxformers import durable
from jaxformers.errors import UserError

BLOCK = 1 << 20  # Bytes read at a time; larger blocks leave the CPU's cache.


def of_file(path: Path) -> str:
  """Digest of a file's bytes, 32 hexadecimal digits."""
  digest = xxhash.xxh3_128()
  block = memoryview(bytearray(BLOCK))
  with path.open("rb", buffering=0) as file:
    while size := file.readinto(block):
      digest.update(block[:size])
  return digest.hexdigest()


def of_array(array: np.ndarray) -> str:
  """The digest that a file has to which `np.save` writes an array."""
  digest = xxhash.xxh3_128()
  array = np.ascontiguousarray(array)
  header = np.lib.format.header_data_from_array_1_0(array)
  np.lib.format.write_array_header_1_0(_Writer(digest), header)
  digest.update(array.data if array.size else b"")
  return digest.hexdigest()


class _Writer:
  """Hands what is written to a digest."""

  def __init__(self, digest: Any) -> None:
    self.write = digest.update


def of_parts(*parts: str | np.ndarray) -> str:
  """Digest of texts and arrays, their types and their shapes."""
  digests = [
    part if isinstance(part, str) else of_array(part) for part in parts
  ]
  return _of_json(digests)


def _of_json(content: Any) -> str:
  text = json.dumps(content, sort_keys=True)
  return xxhash.xxh3_128_hexdigest(text.encode())


def seal(folder: Path, name: str, content: Mapping[str, Any]) -> None:
  """Writes the record of a folder that is otherwise complete.

  Args:
    folder: no file of it may change afterwards.
    name: name of the record.
    content: what the record holds beside `digests`, from the names of all other
      files to their digests, and `digest`, of all the rest of the record.
  """
  digests = {
    path.relative_to(folder).as_posix(): of_file(path)
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }
  record = json.loads(json.dumps({**content, "digests": digests}))
  durable.write_json(folder / name, {**record, "digest": _of_json(record)})


def verify(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, str]]:
  """Reads all files of a sealed folder, and compares them with their digests.

  Returns:
    The content that was given to `seal`, and the digests of the files.

  Raises:
    UserError: for a missing or damaged file, with the remedy.
  """
  try:
    record = _read(folder / name)
  except ValueError as error:
    raise _damaged(folder, name, f"is not readable ({error})") from None
  except _MISSING as error:
    raise _damaged(folder, name, f"is missing ({error.strerror})") from None
  if record.pop("digest", None) != _of_json(record) or "digests" not in record:
    raise _damaged(folder, name, "differs from its digest")
  files = record.pop("digests")
  for other, digest in files.items():
    try:
      differs = of_file(folder / other) != digest
    except _MISSING as error:
      raise _damaged(folder, other, f"is missing ({error.strerror})") from None
    if differs:
      raise _damaged(folder, other, "differs from its digest")
  return record, files


def is_older(folder: Path, name: str, field: str) -> bool:
  """True if the record has a field, and is of a version without digests."""
  try:
    fields = _read(folder / name).keys()
  except (ValueError, *_MISSING):
    return False
  return field in fields and not {"digest", "digests"} & fields


# Other errors, such as of a file system that is away, are no damage.
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def _read(path: Path) -> dict[str, Any]:
  try:
    record = json.loads(path.read_text(encoding="utf-8"))
  except RecursionError:
    raise UserError("it is nested too deeply") from None
  if not isinstance(record, dict):
    raise UserError(f"a JSON object is expected, not {record!r:.40}")
  return record


def _damaged(folder: Path, name: str, what: str) -> ValueError:
  return ValueError(
    f"Prepared data is damaged: {folder / name} {what}. Remove {folder} and "
    "run again: it is prepared anew."
  )
