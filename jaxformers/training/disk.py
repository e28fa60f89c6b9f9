"""Errors of the disk, or the mounted file system, that holds a workdir.

A run does not wait for its disk: it ends with one message, and the same command
goes on from the latest checkpoint once the disk is well again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from jaxformers.training import processes

_FULL = (errno.ENOSPC, errno.EDQUOT)
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
# How libraries quote these errors, and what object stores answer.
_QUOTED = {
  "No space left": errno.ENOSPC,
  "Disk quota": errno.EDQUOT,
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
  if number in (*_FULL, *_AWAY):
    return int(number)
  text = str(error)
  return next((code for words, code in _QUOTED.items() if words in text), 0)


def holds_run(workdir: Path) -> bool:
  """Returns True if a folder is the workdir of a run that has begun.

  A host that has lost a shared file system finds an empty folder in its place,
  in which orbax would go on as if nothing had happened.
  """
  try:
    return (workdir / "config.json").exists()
  except OSError:  # Some file systems raise when they do not answer.
    return False


@contextlib.contextmanager
def saving(content: str, workdir: Path) -> Iterator[None]:
  """Runs a block that writes to a workdir.

  Args:
    content: what the block saves, for the message.
    workdir: workdir of the run.

  Raises:
    OSError: if the disk is full or absent, with its `errno`. All other errors
      of the block pass.
  """
  try:
    yield
  except Exception as error:
    number = error_number(error)
    if isinstance(error, FileNotFoundError) and not holds_run(workdir):
      number = errno.EIO
    if not number or processes.explain_lost(error):
      raise
    state = "is full" if number in _FULL else "does not answer"
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    raise OSError(
      number,
      f"The disk of the workdir {workdir} {state} ({reason}), so {content} was "
      "not saved; everything saved before is untouched",
    ) from error
