"""Atomic writes of files and folders, and detection of full disks.

A file or folder that exists is complete, even after a loss of power. The
content is written to the disk before it gets its final name, because file
systems may write a new name before its content.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

# Some file systems, such as object stores, cannot sync a folder.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def write_text(path: Path, text: str) -> None:
  """Writes a UTF-8 file atomically: readers see the old or the new content.

  Raises:
    OSError: if the file cannot be written. The old content stays.
  """
  # Write a hidden file next to it, and rename this file once it is complete.
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
  """Writes a JSON file atomically; see `write_text`.

  Raises:
    ValueError: if the content has NaN or infinity.
    OSError: if the file cannot be written. The old content stays.
  """
  text = json.dumps(content, indent=2, allow_nan=False)
  write_text(path, text + "\n")


def rename(staged: Path, path: Path) -> None:
  """Renames a folder after writing all of its content to the disk."""
  _sync_content(staged)
  os.rename(staged, path)
  _sync(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
  """Yields an empty folder that replaces `path` at the end of the block.

  Readers see the complete old folder or the complete new folder. After an error
  or a kill they see the old folder. A second process waits until the first
  process has finished.

  Args:
    path: folder to write. It is created if it is missing, and its old content
      is removed.

  Raises:
    OSError: if the folder cannot be written. The old folder stays.
  """
  # Write to a hidden folder next to `path`, and keep the old folder aside.
  path = path.resolve()
  path.parent.mkdir(parents=True, exist_ok=True)
  staged, aside = (
    path.with_name(f".{path.name}.{suffix}") for suffix in ("staged", "aside")
  )
  with _lock(path.with_name(f".{path.name}.lock")):
    # Restore or remove the leftovers of a process that was killed.
    if aside.exists() and not path.exists():
      os.rename(aside, path)
    for folder in (staged, aside):
      shutil.rmtree(folder, ignore_errors=True)
    staged.mkdir()
    # Let the caller write, and exchange the folders.
    try:
      yield staged
      _sync_content(staged)
      if path.exists():
        _exchange(staged, path, aside)
      else:
        os.rename(staged, path)
      _sync(path.parent)
    finally:
      shutil.rmtree(staged, ignore_errors=True)


def _lock(path: Path) -> contextlib.AbstractContextManager[Any]:
  """Waits for a lock; returns an empty context if locks are not supported."""
  try:
    return filelock.FileLock(path).acquire()
  except NotImplementedError:
    return contextlib.nullcontext()
  except OSError as error:
    if error.errno not in (errno.ENOLCK, *_UNSUPPORTED):
      raise
    return contextlib.nullcontext()


_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2).
_HERE = -100  # AT_FDCWD, the working directory.


def _exchange(first: Path, second: Path, aside: Path) -> None:
  """Exchanges two folders, in one step if the file system supports it.

  Otherwise a kill may leave the second folder only under the name `aside`.
  """
  # One step, by a system call of Linux.
  renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
  names = (_HERE, os.fsencode(first), _HERE, os.fsencode(second))
  if renameat2 and renameat2(*names, _EXCHANGE) == 0:
    return
  # Two steps, which are undone if the second one fails.
  os.rename(second, aside)
  try:
    os.rename(first, second)
  except OSError:
    os.rename(aside, second)
    raise
  os.rename(aside, first)


def _sync_content(top: Path) -> None:
  """Waits until all files and subfolders of a folder are on the disk."""
  for folder, _, names in os.walk(top, topdown=False):
    for name in names:
      _sync(Path(folder, name))
    _sync(Path(folder))


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


# Reasons for which a file cannot grow, by the error number of the system.
_FULL = {
  errno.ENOSPC: "the disk is full",
  errno.EDQUOT: "the disk quota is used up",
  errno.EFBIG: "the file size limit is reached, see ulimit -f",
}


def full_disk_reason(error: BaseException) -> str | None:
  """Returns why a file cannot grow, or None for any other error.

  Libraries such as orbax and the writers of array_record raise other errors,
  which quote the message of the operating system or have an `OSError` as their
  context.
  """
  # The error itself: compare its number, and search its message.
  for number, reason in _FULL.items():
    has_code = getattr(error, "errno", None) == number
    if has_code or os.strerror(number) in str(error):
      return reason
  # The error that caused it.
  hidden = None if error.__suppress_context__ else error.__context__
  cause = error.__cause__ or hidden
  return None if cause is None else full_disk_reason(cause)
