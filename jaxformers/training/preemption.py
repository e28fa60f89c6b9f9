"""SIGTERM and Ctrl-C, which end a run after its current step."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import jax

from jaxformers.training import processes

# Signals that end a run after its current step, and their names in messages.
STOP_SIGNALS: dict[int, str] = {
  signal.SIGTERM: "SIGTERM",
  signal.SIGINT: "Ctrl-C",
}


class Preemption:
  """Records SIGTERM and Ctrl-C, so that the loop can stop between steps.

  A second Ctrl-C interrupts at once. With several processes, any of them may
  receive a signal, and all of them stop after the same step: JAX handles
  SIGTERM there and informs the others.
  """

  def __init__(self) -> None:
    self._noted = 0  # Signal that has arrived; 0 for none.
    self._has_peers = jax.process_count() > 1
    self._handlers: dict[int, Any] = {}

  def stop_signal(self, step: int) -> int:
    """Returns the signal that asks to stop, or 0; called after every step."""
    if self._has_peers:
      return signal.SIGTERM if processes.is_stop_requested(step) else 0
    return self._noted

  def __enter__(self) -> Preemption:
    # Only the main thread can handle signals; a notebook may run in another.
    if threading.current_thread() is not threading.main_thread():
      return self
    signals = [signal.SIGINT] if self._has_peers else list(STOP_SIGNALS)
    for number in signals:
      # A background process of a shell ignores Ctrl-C, and keeps ignoring it.
      if signal.getsignal(number) is not signal.SIG_IGN:
        self._handlers[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)

  def _note(self, number: int, _: object) -> None:
    if number == signal.SIGINT:
      if self._noted == number:
        raise KeyboardInterrupt
      # Not print, which the signal may have interrupted.
      os.write(2, b"\nSaving after this step; Ctrl-C again stops at once.\n")
      # JAX passes SIGTERM on to the other processes.
      if self._has_peers:
        os.kill(os.getpid(), signal.SIGTERM)
    self._noted = number
