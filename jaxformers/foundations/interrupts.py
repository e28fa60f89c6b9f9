"""Ends a command that is interrupted or whose reader has gone, quietly."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn


def leave(advice: str = "") -> NoReturn:
  """Ends this process at once, with status 130.

  A normal exit would wait for threads that still read or generate data.

  Args:
    advice: one sentence on what running the same command again does; "" for a
      command that starts again from nothing.
  """
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  again = f" Run the same command again: {advice}" if advice else ""
  sys.stderr.write(f"\nInterrupted.{again}\n")
  sys.stderr.flush()
  os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def importing() -> Iterator[None]:
  """Ends this process at once at Ctrl-C, inside the block.

  For imports: an extension module turns KeyboardInterrupt into other errors.
  """
  before = signal.getsignal(signal.SIGINT)
  if before is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: leave())
  try:
    yield
  finally:
    if before is signal.default_int_handler:
      signal.signal(signal.SIGINT, before)


def print_all_letters() -> None:
  """Makes stdout print the codes of letters that the locale cannot show."""
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def closed_pipe() -> Iterator[None]:
  """Ends this process with status 141 if the reader of its output has gone.

  `jaxformers models | head` closes the pipe after ten lines; a shell's own
  tools end in the same way, by SIGPIPE.
  """
  print_all_letters()
  try:
    yield
    sys.stdout.flush()
  except BrokenPipeError:
    # Python flushes again at its end: let that write go nowhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
