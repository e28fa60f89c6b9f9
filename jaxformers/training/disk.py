"""Errors of the disk, or of the mounted file system, that holds a workdir.

A run does not wait for its disk. It ends with one message, and the same command
continues from the latest checkpoint once the disk works again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from jaxformers.foundations import durable
from jaxformers.training import processes

# Error codes of a disk, or of a mounted file system, that is absent.
_AWAY = (
  errno.EIO,
  errno.ESTALE,
  errno.EACCES,
  errno.EROFS,
  errno.ENODEV,
  errno.ENOTCONN,
  errno.ETIMEDOUT,
  errno.EHOSTDOWN,
)
# Texts with which libraries and file servers report these errors.
_QUOTED = {
  "Input/output error": errno.EIO,
  "Stale file handle": errno.ESTALE,
  "ermission denied": errno.EACCES,
  "PERMISSION_DENIED": errno.EACCES,
  "UNAVAILABLE": errno.EIO,
  "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
}


def error_number(error: BaseException) -> int:
  """Returns the `errno` of a full or absent disk; 0 for any other error."""
  number = getattr(error, "errno", None)
  if durable.full_disk_reason(error):
    return number or errno.ENOSPC
  if number in _AWAY:
    return int(number)
  text = str(error)
  return next((code for words, code in _QUOTED.items() if words in text), 0)


def holds_run(workdir: Path) -> bool:
  """Returns True if a folder is the workdir of a run that has begun.

  A host that has lost a shared file system sees an empty folder instead. There
  orbax would continue without noticing.
  """
  try:
    return (workdir / "config.json").exists()
  except OSError:  # Some file systems raise when they do not answer.
    return False


@contextlib.contextmanager
def saving(content: str, workdir: Path) -> Iterator[None]:
  """Runs a block that writes to a workdir, and explains errors of the disk.

  Args:
    content: name of what the block saves, which begins the message.
    workdir: workdir of the run.

  Raises:
    OSError: if the disk is full or absent, with its `errno`. Other errors of
      the block are raised unchanged.
  """
  try:
    yield
  except Exception as error:
    # Find the `errno` of the disk; 0 if the error has another cause.
    number = error_number(error)
    # A timeout counts as well, even if the wall clock has jumped.
    if isinstance(error, TimeoutError):
      number = number or errno.ETIMEDOUT
    if isinstance(error, FileNotFoundError) and not holds_run(workdir):
      number = errno.EIO
    if not number or processes.explain_lost(error):
      raise
    # Name the problem, and quote the first line of the error.
    problem = durable.full_disk_reason(error) or "the disk does not answer"
    first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    raise OSError(
      number,
      f"{content} was not saved in {workdir}: {problem} ({first_line}). "
      "Everything saved before is untouched",
    ) from error
