"""Files and folders that are complete whenever they exist, and full disks.

This holds across a loss of power: content is written to the disk before it gets
its name, because file systems may write a new name before its content.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Some file systems, such as those of object stores, cannot sync a folder.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def write_text(path: Path, text: str) -> None:
  """Writes a UTF-8 file: readers see the old content or the new, not a part.

  Raises:
    OSError: if it cannot be written; the old content stays.
  """
  staged = path.with_name(f".{path.name}.staged")
  try:
    with staged.open("w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    staged.replace(path)
  except OSError:
    staged.unlink(missing_ok=True)
    raise
  _sync(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
  """Writes JSON as `write_text` does; ValueError for NaN and infinity."""
  text = json.dumps(content, indent=2, allow_nan=False)
  write_text(path, text + "\n")


def rename(staged: Path, path: Path) -> None:
  """Renames a folder after writing all of its content to the disk."""
  for folder, _, names in os.walk(staged, topdown=False):
    for name in names:
      _sync(Path(folder, name))
    _sync(Path(folder))
  os.rename(staged, path)
  _sync(path.parent)


def _sync(path: Path) -> None:
  """Waits until a file, or the names in a folder, are on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError as error:
    if error.errno not in _UNSUPPORTED:
      raise
  finally:
    os.close(descriptor)


# What the operating system says of a file that cannot grow.
_FULL = {
  errno.ENOSPC: "the disk is full",
  errno.EDQUOT: "the disk quota is used up",
  errno.EFBIG: "the file size limit is reached, see ulimit -f",
}


def full_disk_reason(error: BaseException) -> str | None:
  """Returns why a file cannot grow, or None for any other error.

  Libraries such as orbax and the writers of array_record quote the operating
  system in errors of their own, or raise them while handling an `OSError`.
  """
  for number, reason in _FULL.items():
    has_code = getattr(error, "errno", None) == number
    if has_code or os.strerror(number) in str(error):
      return reason
  hidden = None if error.__suppress_context__ else error.__context__
  cause = error.__cause__ or hidden
  return None if cause is None else full_disk_reason(cause)
