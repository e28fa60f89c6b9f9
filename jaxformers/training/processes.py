"""Several processes that train together: one per host, each with its devices.

They communicate through `jax.distributed`. Every process runs the same program
on its rows of every batch; only the first one writes files and messages.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformers.foundations.errors import UserError

# Environment variables that launchers set; the names are JAX's.
VARIABLES = {
  "coordinator": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Processes that train together, and how long they wait for each other.

  Attributes:
    coordinator: host:port of the first process; "" if JAX detects it (Cloud
      TPU, Slurm, Open MPI, Kubernetes).
    num_processes: number of processes; -1 to detect it.
    process_id: index of this process, from 0; -1 to detect it.
    start_seconds: time to wait for all processes to arrive.
    silence_seconds: time after which a silent process counts as dead, and all
      others end.
    stall_seconds: time without a new step (or, before the first one, without a
      new compilation) after which a process ends itself,
      and thereby the others. It is for a process that hangs on a live host. 0
      turns it off.
  """

  coordinator: str = ""
  num_processes: int = -1
  process_id: int = -1
  start_seconds: int = 300
  silence_seconds: int = 60
  stall_seconds: int = 1800


def find_cluster(
  environ: Mapping[str, str] = os.environ, **flags: int | str
) -> Cluster:
  """Returns the cluster of flags, or of the environment where they are unset.

  Args:
    environ: environment variables, of which `VARIABLES` are read.
    **flags: fields of `Cluster`; "" and -1 mean unset.

  Raises:
    UserError: if only a part of the cluster is given, or if a value is not an
      integer.
  """
  # Flags take precedence over environment variables.
  fields: dict[str, Any]
  fields = {k: v for k, v in flags.items() if v not in ("", -1)}
  for name, variable in VARIABLES.items():
    value = environ.get(variable, "")
    if name in fields or not value:
      continue
    try:
      fields[name] = value if name == "coordinator" else int(value)
    except ValueError:
      raise UserError(
        f"{variable}={value!r} is not a number: set it to an integer."
      ) from None
  # Either all three are given, or none of them.
  missing = [name for name in VARIABLES if name not in fields]
  if 0 < len(missing) < len(VARIABLES):
    raise UserError(
      f"--{' --'.join(k for k in VARIABLES if k in fields)} without "
      f"--{' --'.join(missing)}: give all three, or none of them where JAX "
      "detects the cluster."
    )
  cluster = Cluster(**fields)
  # Check the port of the coordinator, and the index of this process.
  _, colon, port = cluster.coordinator.rpartition(":")
  if cluster.coordinator and not (colon and port.isdecimal()):
    raise UserError(
      f"--coordinator={cluster.coordinator} has no port: give host:port of the "
      "first process, such as 10.0.0.1:8476."
    )
  if not missing and not 0 <= cluster.process_id < cluster.num_processes:
    raise UserError(
      f"--process_id={cluster.process_id} is not in 0 to "
      f"{cluster.num_processes - 1}: number the processes from 0."
    )
  return cluster


# Program of a small process that runs next to each of several processes. It
# reads the last output of Python and explains it, because JAX may abort a
# process from a thread that no Python code can stop.
_WITNESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
name, stall = sys.argv[1:]
said = sys.stdin.read()
# JAX aborts from a thread that is not Python's; a fault of the process itself
# has a current thread.
if "Fatal Python error: Aborted" in said and "Current thread" not in said:
  said = (
    f"error: {name} was ended by JAX (status 134) because another process of "
    "this run has died or cannot be reached; JAX names it above if it knows. "
    "Start all of them again: they continue from the latest checkpoint."
  )
elif said.startswith("Timeout"):
  said = (
    f"error: {name} has not come to its next step for --stall_seconds={stall}, "
    "and ends, so that all can start again. It hung here:\\n" + said
  )
sys.stderr.write(said and said.strip() + "\\n")
"""


# Restarts the timer of the seconds without a step; `start` sets it.
_restart_timer: Callable[[], None] | None = None


def _start_witness(stall_seconds: int) -> Callable[[], None]:
  """Starts a process that reports how this one ended, where Python cannot.

  Args:
    stall_seconds: time without a step after which this process ends; 0 for
      never.

  Returns:
    A function that restarts the timer of the seconds without a step.
  """
  name = f"process {rank()} ({socket.gethostname()})"
  witness = subprocess.Popen(
    [sys.executable, "-S", "-c", _WITNESS, name, str(stall_seconds)],
    stdin=subprocess.PIPE,
    start_new_session=True,  # A signal to the process group spares it.
  )
  # Python writes the stacks of a fatal error to the witness.
  file = witness.stdin
  assert file is not None  # It is a pipe.
  faulthandler.enable(file)

  def restart() -> None:
    if stall_seconds:
      faulthandler.dump_traceback_later(stall_seconds, exit=True, file=file)

  return restart


def hide_lines(beginning: bytes) -> None:
  """Drops lines with a given beginning that C++ libraries write to stdout.

  Other lines of these libraries pass through a pipe. Python's output does not.

  Args:
    beginning: first bytes of the lines.
  """
  # Python keeps the real stdout, and the libraries get a pipe.
  sys.stdout.flush()
  stdout = os.dup(1)
  encoding = sys.stdout.encoding
  sys.stdout = os.fdopen(stdout, "w", buffering=1, encoding=encoding)
  read, write = os.pipe()
  os.dup2(write, 1)
  os.close(write)

  # Forward the other lines in a thread.
  def forward() -> None:
    with open(read, "rb") as lines:
      for line in lines:
        if not line.startswith(beginning):
          os.write(stdout, line)

  threading.Thread(target=forward, daemon=True).start()


def start(cluster: Cluster) -> None:
  """Joins the other processes; called before any other use of JAX.

  If a process dies, or if its host is silent for too long, the others end as
  well. A process that fails must call `end_at_once`, because a normal exit of
  Python would wait for the others. If JAX ends this process, a line on stderr
  explains why.
  """
  global _restart_timer
  is_named = cluster.num_processes > 0
  jax.distributed.initialize(
    cluster.coordinator if is_named else None,
    cluster.num_processes if is_named else None,
    cluster.process_id if is_named else None,
    initialization_timeout=cluster.start_seconds,
    heartbeat_timeout_seconds=cluster.silence_seconds,
  )
  if jax.default_backend() == "cpu":
    hide_lines(b"[Gloo]")  # One line for every group of devices.
  # JAX now knows of all processes, and watches them.
  if jax.process_count() > 1:
    _restart_timer = _start_witness(cluster.stall_seconds)


def restart_stall_timer() -> None:
  """Reports that this process is alive.

  Called before every step, and before the first one is compiled.
  """
  if _restart_timer:
    _restart_timer()


def has_peers() -> bool:
  """Returns True if this process trains together with others."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


# Words of errors about a lost process: of collectives on CPUs and GPUs, and of
# JAX's coordinator.
_LOST = (
  "Gloo",
  "Connection closed by peer",
  "NCCL",
  "Socket closed",
  "coordination service",
  "GetKeyValue",
  "Barrier",
)


def explain_lost(error: BaseException) -> str:
  """Returns a message for an error about a lost process, else ""."""
  text, hint = str(error), ""
  if not any(words in text for words in _LOST):
    return ""
  # Debian maps the name of a host to 127.0.1.1 in /etc/hosts.
  if "remote=[127." in text:
    hint = (
      " It was looked for at 127.0.0.1: on CPUs hosts find each other by their "
      "names. Make the names resolve to addresses that the other hosts reach "
      "(see /etc/hosts)."
    )
  return (
    f"process {rank()} has lost another process of this run, which has died or "
    "cannot be reached. Start all of them again: they continue from the latest "
    f"checkpoint.{hint} ({text.splitlines()[0][:200]})"
  )


def end_at_once(status: int) -> NoReturn:
  """Ends this process at once, and thereby the others."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)  # A regular end would wait for the others.


def rank() -> int:
  """Returns the index of this process, from 0."""
  return jax.process_index()


def is_first() -> bool:
  """Returns True for the process that writes files and messages."""
  return rank() == 0


def warn(message: str) -> None:
  """Prints a message on stderr, once for all processes."""
  if is_first():
    print(message, file=sys.stderr)


def broadcast_from_first(flag: bool) -> bool:
  """Returns the flag of the first process in all processes.

  Use it for files, which may appear or vanish between two processes' checks.
  """
  return bool(multihost_utils.broadcast_one_to_all(np.array(flag)))


def all_true(flag: bool) -> bool:
  """Returns True if the flag is True in all processes."""
  return bool(multihost_utils.process_allgather(np.array(flag)).all())


def least(size: int) -> int:
  """Returns the least size in bytes of all processes.

  With several processes it is rounded down to a MiB.
  """
  if not has_peers():
    return size
  sizes = multihost_utils.process_allgather(np.int32(size >> 20))
  return int(sizes.min()) << 20


def require_same(fields: Mapping[str, Any]) -> None:
  """Checks that fields have the same values in all processes.

  Args:
    fields: plain JSON by name.

  Raises:
    UserError: in all processes, if a field differs; the message names the field
      and two of its values.
  """
  if not has_peers():
    return
  # Gather one array of bytes from every process, padded to one length.
  text = json.dumps(fields, sort_keys=True).encode()
  sizes = multihost_utils.process_allgather(np.int32(len(text)))
  padded = np.frombuffer(text.ljust(int(sizes.max())), np.uint8)
  texts = multihost_utils.process_allgather(padded)
  described = [json.loads(bytes(row)) for row in np.asarray(texts)]
  if lines := differing(described):
    raise UserError(
      "The processes of this run differ, and would train different models or "
      f"wait for each other forever: {'; '.join(lines)}. Start all of them "
      "with the same config, data and code."
    )


def differing(described: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line for each field that differs between processes.

  Args:
    described: fields of each process, by its index.
  """
  lines = []
  for name in sorted({name for fields in described for name in fields}):
    values = [fields.get(name, "absent") for fields in described]
    # Compare every process with the first one.
    other = next((i for i, v in enumerate(values) if v != values[0]), 0)
    if other:
      lines.append(
        f"{name} is {values[0]!r} in process 0 and {values[other]!r} in "
        f"process {other}"
      )
  return lines


def wait_for_all(name: str) -> None:
  """Waits until all processes have come here.

  Args:
    name: name of the place, the same in all processes.
  """
  multihost_utils.sync_global_devices(name)


# Step with which `is_stop_requested` was called last.
_last_step = 0


def is_stop_requested(step: int) -> bool:
  """Returns True if all processes stop after a step, as one was sent SIGTERM.

  JAX informs the others, and they agree on the step after the last one that
  any of them asked for. Called after every step.
  """
  global _last_step
  reached = multihost_utils.reached_preemption_sync_point
  # After a signal before the first step of a resumed run, that is another step.
  is_early = step != _last_step + 1 and reached(_last_step + 1)
  _last_step = step
  return is_early or reached(step)
