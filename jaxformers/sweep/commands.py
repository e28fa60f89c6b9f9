"""Commands in separate processes: on this machine, or as a job of Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

SECONDS_TO_SAVE = 100  # Time that a run has to save after a signal.

# Replaces itself by the command. The command gets SIGTERM even if its parent is
# killed by SIGKILL. It ignores SIGHUP: if the terminal closes, the parent gets
# the signal, and lets the command save.
_START = """
import ctypes, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if sys.platform == "linux":
  ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.argv[2], sys.argv[2:])
"""


def call(command: Sequence[str]) -> int:
  """Runs a command to its end and returns its exit status.

  If this process gets SIGTERM or SIGHUP, it ends the command, which saves, and
  then itself.
  """
  is_ending = False
  # The starter needs no site packages: -S saves the time to find them.
  start = [sys.executable, "-S", "-c", _START, str(os.getpid())]
  with subprocess.Popen([*start, *command]) as process:

    def stop(*_: object) -> None:
      nonlocal is_ending
      is_ending = True
      process.terminate()

    # Pass signals on to the command, and restore the handlers at its end.
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As under nohup.
      numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
      status = process.wait()
    except KeyboardInterrupt:  # The terminal sent it to the command as well.
      process.wait()
      sys.exit(130)
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
  # A run that could not save has a status other than 143; the sweep must end in
  # that case as well.
  if is_ending or status == 143:
    sys.exit(143)
  return status


class Job:
  """A command as a job of submitit, which pickles it and calls it on a node."""

  def __init__(self, command: Sequence[str]) -> None:
    self.command = list(command)

  def __call__(self) -> int:
    """Runs the command to its end and returns its exit status.

    A command that a signal has stopped has no result: this process ends as
    well, and Slurm decides whether the job continues.
    """
    env = dict(os.environ)
    # A node has a single task, which uses all of its devices.
    count = env.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
      env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(int(count))))
    # Slurm may send the signal of the time limit to the command as well.
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # A child process inherits ignored signals, but no handlers.
    self._process = subprocess.Popen(self.command, env=env)
    signal.signal(signal.SIGUSR2, before)
    status = self._process.wait()
    if status in (143, -signal.SIGTERM):
      sys.exit(0)
    return status

  def checkpoint(self) -> Any:
    """Lets the command save at the time limit; returns a job that resumes."""
    import submitit

    self._process.terminate()
    # This method interrupts `wait`, which cannot be called again inside it.
    # WNOWAIT leaves the status to `wait`, and WNOHANG returns at once.
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while os.waitid(os.P_PID, self._process.pid, ended) is None:
      if time.monotonic() > deadline:
        break  # The previous checkpoint is intact.
      time.sleep(0.1)
    return submitit.helpers.DelayedSubmission(Job(self.command))
