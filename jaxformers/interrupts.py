"""Ends a command after Ctrl-C with one line instead of a traceback."""

from __future__ import annotations

import os
import signal
import sys
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
