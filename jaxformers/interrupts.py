"""How a command ends after Ctrl-C: in one line, not in a traceback."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def leave(advice: str) -> NoReturn:
  """Ends this process at once, with status 130.

  Threads that still read or generate data would be waited for otherwise.

  Args:
    advice: one sentence, what running the same command again does.
  """
  sys.stderr.write(f"\nInterrupted. Run the same command again: {advice}\n")
  sys.stderr.flush()
  os._exit(128 + signal.SIGINT)
