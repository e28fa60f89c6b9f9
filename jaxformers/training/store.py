"""The folder of a run: a disk that fills up, a store that is away for a while.

A run waits for it as long as its config says, and then goes on as if nothing
had been; what had been saved before is untouched either way.
"""

from __future__ import annotations

import dataclasses
import errno
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxformers.training import processes

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
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
# How libraries quote them, and what stores answer that are no file systems.
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
_LONGEST = 30.0  # Seconds between two tries.
MARK = "config.json"  # Every run begins by writing it.


def trouble(error: BaseException) -> int:
  """What a store's error is, as in `errno`; 0 for one that is none of it."""
  code = getattr(error, "errno", None)
  if code in (*FULL, *_AWAY):
    return int(code)
  text = str(error)
  return next((code for word, code in _QUOTED.items() if word in text), 0)


@dataclasses.dataclass(frozen=True)
class Store:
  """Where a run writes.

  Attributes:
    folder: of the run.
    seconds: how long to wait for it in trouble; 0 for not at all.
  """

  folder: Path
  seconds: float = 0.0

  def is_there(self) -> bool:
    """Whether the folder is that of the run, and no other made in its place.

    A host that has lost a shared file system has an empty folder there, in
    which a library may go on as if nothing had been.
    """
    try:
      return self.folder.joinpath(MARK).exists()
    except OSError:  # Some are raised even by asking.
      return False

  def probe(self, size: int) -> None:
    """Raises OSError in all processes unless each can write so many bytes."""
    found = None
    try:
      if not self.is_there():
        found = OSError(errno.EIO, f"{MARK} is not there")
      else:
        path = self.folder / f".probe-{processes.rank()}"
        path.write_bytes(b"\0")
        path.unlink()
        if shutil.disk_usage(self.folder).free < size:
          found = OSError(errno.ENOSPC, "No space left for a checkpoint")
    except OSError as error:
      found = error
    if not processes.all_agree(found is None):
      raise found or OSError(errno.EIO, "It fails another process")

  def patiently(self, what: str, action: Callable[[], T]) -> T:
    """Does something with the store, in trouble again until it works.

    Args:
      what: it is about, for people.
      action: what may raise `trouble`.

    Raises:
      OSError: with the `errno` of the trouble, if it has not ended in time.
    """
    end = time.monotonic() + self.seconds
    pause, told = 0.5, False
    while True:
      try:
        return action()
      except Exception as error:
        code = trouble(error)
        if isinstance(error, FileNotFoundError) and not self.is_there():
          code = errno.EIO
        if not code or processes.lost(error):
          raise
        processes.alive()
        left = end - time.monotonic()
        state = "is full" if code in FULL else "does not answer"
        if left <= 0:
          raise OSError(
            code,
            f"The store {self.folder} {state} ({_first(error)}), so {what} was "
            "not saved; what was before is untouched",
          ) from error
        if not told and processes.is_first():
          told = True
          print(
            f"The store {self.folder} {state} ({_first(error)}): {what} waits "
            f"for it, {self.seconds:.0f} s at most (config.store_seconds).",
            file=sys.stderr,
            flush=True,
          )
      time.sleep(min(pause, left))
      pause = min(2 * pause, _LONGEST)


def _first(error: BaseException) -> str:
  """The first line of a message."""
  return (str(error).splitlines() or [type(error).__name__])[0][:200]
