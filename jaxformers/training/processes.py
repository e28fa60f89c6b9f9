"""Several processes that train together: one a host, each with its devices.

The engine is `jax.distributed`. Every process runs the same program on its rows
of every batch; the first one alone writes what people read.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

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
  """

  coordinator: str = ""
  num_processes: int = -1
  process_id: int = -1
  start_seconds: int = 300
  silence_seconds: int = 60


def group(
  environ: Mapping[str, str] = os.environ, **fields: int | str
) -> Group:
  """The group of flags, and of the environment where flags say nothing.

  Raises:
    ValueError: for a group that is named in part, or no number.
  """
  given = {k: v for k, v in fields.items() if v not in ("", -1)}
  for name, variable in VARIABLES.items():
    value = environ.get(variable, "")
    if name not in given and value:
      given[name] = value if name == "coordinator" else _number(variable, value)
  missing = [name for name in VARIABLES if name not in given]
  if 0 < len(missing) < len(VARIABLES):
    raise ValueError(
      f"--{' --'.join(k for k in VARIABLES if k in given)} without "
      f"--{' --'.join(missing)}: give all three, or none of them where a "
      "cluster tells JAX."
    )
  found = Group(**given)
  if not missing and not 0 <= found.process_id < found.num_processes:
    raise ValueError(
      f"--process_id={found.process_id} is not in 0 to "
      f"{found.num_processes - 1}."
    )
  return found


def _number(variable: str, value: str) -> int:
  try:
    return int(value)
  except ValueError:
    raise ValueError(f"{variable}={value!r} is no number.") from None


def start(group: Group) -> None:
  """Joins the others; before anything else of JAX.

  A process that dies, or whose host is silent for too long, ends the others as
  well. One that fails must `leave`: at the end of Python it would wait for the
  others.
  """
  known = group.num_processes > 0
  jax.distributed.initialize(
    group.coordinator or None,
    group.num_processes if known else None,
    group.process_id if known else None,
    initialization_timeout=group.start_seconds,
    heartbeat_timeout_seconds=group.silence_seconds,
  )


def is_together() -> bool:
  """Whether this process has joined others."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_lost(error: BaseException) -> bool:
  """Whether an error says that another process is gone."""
  text = str(error)
  return any(word in text for word in ("Gloo", "Connection closed by peer"))


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
