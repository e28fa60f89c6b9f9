"""Ends a command that is interrupted or whose reader has gone, quietly."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn


def leave(advice: str) -> NoReturn:
  """Ends this process at once, with status 130.

  A normal exit would wait for threads that still read or generate data.

  Args:
    advice: one sentence on what running the same command again does.
  """
  sys.stderr.write(f"\nInterrupted. Run the same command again: {advice}\n")
  sys.stderr.flush()
  os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def closed_pipe() -> Iterator[None]:
  """Ends this process with status 141 if the reader of its output has gone.

  `jaxformers models | head` closes the pipe after ten lines; a shell's own
  tools end in the same way, by SIGPIPE.
  """
  try:
    yield
    sys.stdout.flush()
  except BrokenPipeError:
    # Python flushes again at its end: let that write go nowhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
