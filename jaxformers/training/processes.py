"""Several processes that train together: one a host, each with its devices.

The engine is `jax.distributed`. Every process runs the same program on its rows
of every batch; the first one alone writes what people read.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformers.errors import UserError

# Set by launchers, or given as flags; the names are JAX's own.
VARIABLES = {
  "coordinator": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}


@dataclasses.dataclass(frozen=True)
class Group:
  """Which processes train together.

  Attributes:
    coordinator: host:port of the first; "" to be found by JAX where a cluster
      tells (Cloud TPU, Slurm, Open MPI, Kubernetes).
    num_processes, process_id: how many, and which this one is; -1 likewise.
    start_seconds: to wait for all to arrive.
    silence_seconds: after which a process that says nothing counts as dead, and
      all others end.
    stall_seconds: after which a process ends itself that has not come to the
      next step, and by that the others: one that hangs while its host lives.
  """

  coordinator: str = ""
  num_processes: int = -1
  process_id: int = -1
  start_seconds: int = 300
  silence_seconds: int = 60
  stall_seconds: int = 1800


def group(
  environ: Mapping[str, str] = os.environ, **fields: int | str
) -> Group:
  """The group of flags, and of the environment where flags say nothing.

  Raises:
    UserError: for a group that is named in part, or no number.
  """
  given = {k: v for k, v in fields.items() if v not in ("", -1)}
  for name, variable in VARIABLES.items():
    value = environ.get(variable, "")
    if name not in given and value:
      given[name] = value if name == "coordinator" else _number(variable, value)
  missing = [name for name in VARIABLES if name not in given]
  if 0 < len(missing) < len(VARIABLES):
    raise UserError(
      f"--{' --'.join(k for k in VARIABLES if k in given)} without "
      f"--{' --'.join(missing)}: give all three, or none of them where a "
      "cluster tells JAX."
    )
  found = Group(**given)
  if not missing and not 0 <= found.process_id < found.num_processes:
    raise UserError(
      f"--process_id={found.process_id} is not in 0 to "
      f"{found.num_processes - 1}."
    )
  return found


def _number(variable: str, value: str) -> int:
  try:
    return int(value)
  except ValueError:
    raise UserError(f"{variable}={value!r} is no number.") from None


# Reads what Python says last, and tells it to people when that is the end of a
# process of several: JAX aborts it from a thread that no Python can stop.
_WITNESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
name, stall = sys.argv[1:]
said = sys.stdin.read()
# JAX aborts from a thread that is not Python's; a fault of this process's own
# has a current one.
if "Fatal Python error: Aborted" in said and "Current thread" not in said:
  said = (
    f"error: {name} was ended by JAX (status 134) because another process of "
    "this run has died or cannot be reached; JAX names it above if it knows. "
    "Start all of them again: they go on from the latest checkpoint."
  )
elif said.startswith("Timeout"):
  said = (
    f"error: {name} has not come to its next step for --stall_seconds={stall}, "
    "and ends, so that all can start again. It hung here:\\n" + said
  )
sys.stderr.write(said and said.strip() + "\\n")
"""


class _Witness:
  """A process of its own that tells how this one ended, if outside Python."""

  def __init__(self, stall: int) -> None:
    name = f"process {rank()} ({socket.gethostname()})"
    self._stall = stall
    self._process = subprocess.Popen(
      [sys.executable, "-S", "-c", _WITNESS, name, str(stall)],
      stdin=subprocess.PIPE,
      start_new_session=True,  # It outlives a signal to all.
    )
    faulthandler.enable(self._process.stdin)

  def alive(self) -> None:
    """Starts anew to count the seconds that this process hangs."""
    if self._stall:
      faulthandler.dump_traceback_later(
        self._stall, exit=True, file=self._process.stdin
      )


_witness: _Witness | None = None


def start(group: Group) -> None:
  """Joins the others; before anything else of JAX.

  A process that dies, or whose host is silent for too long, ends the others as
  well. One that fails must `leave`: at the end of Python it would wait for the
  others. When JAX ends this process, a line on stderr says what that means.
  """
  global _witness
  known = group.num_processes > 0
  jax.distributed.initialize(
    group.coordinator or None,
    group.num_processes if known else None,
    group.process_id if known else None,
    initialization_timeout=group.start_seconds,
    heartbeat_timeout_seconds=group.silence_seconds,
  )
  if jax.process_count() > 1:
    _witness = _Witness(group.stall_seconds)


def alive() -> None:
  """Called at every step, the first time before the first: no hanging here."""
  if _witness:
    _witness.alive()


def is_together() -> bool:
  """Whether this process has joined others."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


# In what collectives on CPUs and GPUs say of a peer that is gone, and in what
# the coordinator does.
_LOST = (
  "Gloo",
  "Connection closed by peer",
  "NCCL",
  "Socket closed",
  "coordination service",
  "GetKeyValue",
  "Barrier",
)


def lost(error: BaseException) -> str:
  """What to tell of an error if it says that another process is gone, or ""."""
  text = str(error)
  if not any(word in text for word in _LOST):
    return ""
  hint = ""
  if "remote=[127." in text:
    hint = (
      " It was looked for at 127.0.0.1: on CPUs hosts find each other by their "
      "names, which must stand for addresses that the others reach (see "
      "/etc/hosts)."
    )
  return (
    f"process {rank()} has lost another process of this run, which has died or "
    "cannot be reached. Start all of them again: they go on from the latest "
    f"checkpoint.{hint} ({text.splitlines()[0][:200]})"
  )


def leave(status: int) -> NoReturn:
  """Ends this process at once, and by that the others."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def rank() -> int:
  """Which process this is, from 0."""
  return jax.process_index()


def is_first() -> bool:
  """Whether this process writes what people read."""
  return rank() == 0


def agreed(flag: bool) -> bool:
  """What the first process found, in all of them: files come and go."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.broadcast_one_to_all(np.array(flag)))


def all_agree(flag: bool) -> bool:
  """Whether it is so in all of them."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).all())


def wait(name: str) -> None:
  """Returns when all processes have come here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def asked_to_stop(step: int) -> bool:
  """Whether all processes stop after this step, as one was sent SIGTERM.

  JAX tells the others, and they agree on a step. Called after every step.
  """
  return multihost_utils.reached_preemption_sync_point(step)
