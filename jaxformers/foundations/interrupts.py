"""Quiet ends of a command: after Ctrl-C, and after its output pipe closes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn


def leave(advice: str = "") -> NoReturn:
  """Ends this process immediately, with status 130.

  A normal exit would wait for threads that still read or generate data.

  Args:
    advice: sentence on what happens when the same command is run again; "" for
      a command that starts from the beginning.
  """
  # Print buffered output, and then the message; both streams may be closed.
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  again = f" Run the same command again: {advice}" if advice else ""
  sys.stderr.write(f"\nInterrupted.{again}\n")
  sys.stderr.flush()
  os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def importing() -> Iterator[None]:
  """Makes Ctrl-C end this process immediately, inside the block.

  Use it around imports: an extension module may turn KeyboardInterrupt into
  another error.
  """
  # Replace only Python's default handler.
  before = signal.getsignal(signal.SIGINT)
  if before is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: leave())
  try:
    yield
  finally:
    if before is signal.default_int_handler:
      signal.signal(signal.SIGINT, before)


def print_all_letters() -> None:
  """Makes stdout escape characters that the locale cannot encode."""
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def closed_pipe() -> Iterator[None]:
  """Ends this process with status 141 if the reader of its output closes.

  For example, `jaxformers models | head` closes the pipe after ten lines. The
  tools of a shell end with the same status, by SIGPIPE.
  """
  print_all_letters()
  try:
    yield
    sys.stdout.flush()
  except BrokenPipeError:
    # Python flushes stdout again at its end: redirect it to the null device.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
