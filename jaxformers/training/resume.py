"""Rules under which a run resumes in a workdir that is not empty."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax

from jaxformers import config as configs
from jaxformers import models, tasks
from jaxformers.config import RunConfig
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.training import disk, optim

Plain = Mapping[str, Any]  # Plain JSON.

# Characters of a path that orbax takes for a pattern or a separator.
REFUSED = "*?[\\"
# Errors of file systems without locks.
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def check_writable(workdir: Path) -> None:
  """Creates a workdir, and checks that it can hold a run.

  Raises:
    UserError: if the path is the address of a store, has a character of
      `REFUSED`, or names a folder without permission to write.
    OSError: if the disk is full or absent; the same command may succeed later.
  """
  text = str(workdir)
  # Path turns "gs://bucket" into "gs:/bucket".
  if any(part.endswith(":") for part in workdir.parts):
    raise UserError(
      f"The workdir {text!r} is the address of a store: give the --workdir as "
      "a folder of a file system, such as one where the store is mounted."
    )
  if any("\ud800" <= char <= "\udfff" for char in text):
    raise UserError(
      f"The workdir {text!r} has a name that is not UTF-8, which no file of a "
      "run can hold: choose another --workdir."
    )
  # Refuse characters that orbax could not read back.
  if bad := next((char for char in REFUSED if char in text), None):
    raise UserError(
      f"The workdir {text!r} has {bad!r} in its path, with which checkpoints "
      "could not be read again: choose a --workdir without any of "
      f"{' '.join(REFUSED)}."
    )
  # Write a file now: an error before training is better than one after it.
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f".writable-{jax.process_index()}"
    probe.touch()
    probe.unlink()
  except OSError as error:
    is_forbidden = error.errno in (errno.EACCES, errno.EROFS)
    if disk.error_number(error) and not is_forbidden:
      raise  # The disk may work again later.
    raise UserError(
      f"The workdir {workdir} cannot be written ({error.strerror}): choose "
      "another --workdir."
    ) from None


def has_checkpoints(workdir: Path) -> bool:
  """Returns True if a workdir has a checkpoint that was saved completely.

  The name of such a folder is its step. Until it is complete, orbax adds a
  suffix to the name.
  """
  folders = (workdir / "checkpoints").glob("[0-9]*")
  return any(path.name.isdigit() for path in folders)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Locks a workdir, so that no second run writes there.

  The operating system releases the lock when the process ends, even if it is
  killed. Only the first of several processes calls this.

  Raises:
    UserError: if another process holds the lock; the message names its host,
      its process id, and when it took the lock.
  """
  lock = filelock.FileLock(workdir / ".lock", timeout=0)
  holder = workdir / ".lock.json"
  try:
    lock.acquire()
  except filelock.Timeout:
    raise UserError(
      f"The workdir {workdir} is in use by {_holder(holder)}: wait until that "
      "run has ended, or choose another --workdir."
    ) from None
  except (OSError, NotImplementedError) as error:
    number = getattr(error, "errno", errno.ENOSYS)
    if number in (errno.EACCES, errno.EPERM):
      raise UserError(
        f"The lock {workdir / '.lock'} belongs to another user, whose run may "
        "be live: choose another --workdir."
      ) from None
    if number not in WITHOUT_LOCKS:
      raise
    # A file system without locks is no reason not to train.
    print(
      f"The file system of {workdir} has no locks ({error}): make sure that no "
      "second run works there.",
      file=sys.stderr,
    )
    yield
    return
  # Write down who holds the lock, for the message to others.
  try:
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    content = {"host": socket.gethostname(), "process": os.getpid()}
    with contextlib.suppress(OSError):  # The lock holds on a full disk, too.
      holder.write_text(json.dumps(content | {"since": since}))
    yield
  finally:
    holder.unlink(missing_ok=True)
    lock.release()


def _holder(path: Path) -> str:
  """Describes the holder of a lock, as "process 7 on host1 since ..."."""
  for _ in range(10):  # The holder may not have written the file yet.
    try:
      holder = json.loads(path.read_bytes())
      process, host = holder["process"], holder["host"]
      return f"process {process} on {host} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
      time.sleep(0.1)
  return "another process"


def check_workdir(workdir: Path, config: RunConfig) -> None:
  """Raises UserError if a workdir holds results or checkpoints of another run.

  Args:
    workdir: workdir of the run.
    config: config of the run.
  """
  # Compare the config of the results: config.json may be of a run that never
  # began.
  results = (workdir / "results.json").exists()
  if results:
    saved = RunConfig.from_dict(workdirs.read_results(workdir)["config"])
    if not _differences(saved, config):
      return  # config.json may be of a longer run that has been started.
    _check_goes_on(workdir, "results.json", saved, config)
  # Compare config.json if the run has checkpoints or results.
  has_begun = results or has_checkpoints(workdir)
  if has_begun and (workdir / "config.json").exists():
    saved = RunConfig.from_dict(workdirs.read_config(workdir))
    _check_goes_on(workdir, "config.json", saved, config)


def check_checkpoint(folder: Path, meta: Plain, config: RunConfig) -> None:
  """Raises UserError if a checkpoint was saved under another config.

  Args:
    folder: folder of the checkpoint, in `workdir`/checkpoints.
    meta: content of the checkpoint besides its state.
    config: config of the run.
  """
  workdir, step = folder.parents[1], meta["step"]
  # Compare the configs.
  saved = RunConfig.from_dict(meta["config"])
  _check_goes_on(workdir, f"checkpoints/{folder.name}", saved, config)
  is_last = step == saved.total_steps
  # The last step is always evaluated, which counts for best and patience.
  if is_last and step < config.total_steps and step % saved.eval_steps:
    raise UserError(
      f"The run in {workdir} ended at step {step} with an evaluation that a "
      "longer run would not have, because "
      f"config.eval_steps={saved.eval_steps} does not divide it: train the "
      "longer run in another --workdir."
    )


def _check_goes_on(
  workdir: Path, name: str, saved: RunConfig, config: RunConfig
) -> None:
  """Raises UserError if a run cannot resume under another config.

  The other config may have more steps, unless the schedule ends with the run,
  and more patience. `RESUMABLE_FIELDS` may differ: they change at most
  rounding, and `accumulate` also what is drawn for a part of a batch.
  """
  before, hint = saved, ""
  # Allow more steps, unless the schedule ends with the run.
  schedule = config.schedule.name
  if before.total_steps < config.total_steps:
    if not optim.ends_with_run(schedule):
      before = dataclasses.replace(before, total_steps=config.total_steps)
    else:
      hint = (
        f"\nThe schedule {schedule!r} ends with the run, so this run cannot be "
        "made longer. A run with a constant or rsqrt schedule can."
      )
  # Allow more patience, of which 0 means no limit.
  if before.patience and not 0 < config.patience < before.patience:
    before = dataclasses.replace(before, patience=config.patience)
  # Refuse all other differences.
  if differing := _differences(before, config):
    raise UserError(
      f"The workdir {workdir} belongs to a run of another config ({name}):\n  "
      + "\n  ".join(differing)
      + f"{hint}\nUse that config again, or choose another --workdir."
    )


def _differences(saved: RunConfig, config: RunConfig) -> list[str]:
  """Returns the differences that change numbers; see `config.differences`."""
  # An option of the mixer may be listed as a default of all mixers, and the
  # task may have options that it did not have when the config was saved.
  before, after = (
    tasks.resolve_defaults(models.resolve_defaults(c.as_dict()))
    for c in (saved, config)
  )
  return configs.differences(before, after)


def finished_results(
  workdir: Path, config: RunConfig, description: Plain
) -> dict[str, Any] | None:
  """Returns the results of a finished run, or None if training continues.

  Training continues if there are no results, or if the config has more steps or
  more patience than the results.

  Args:
    workdir: workdir of the run.
    config: config of the run.
    description: description of the task; see `Task.description`.

  Raises:
    UserError: if the results belong to another config or to other data, or if
      they are damaged.
  """
  path = workdir / "results.json"
  if not path.exists():
    return None
  results = workdirs.read_results(workdir)
  # Compare the config and the data of the results.
  saved = RunConfig.from_dict(results["config"])
  _check_goes_on(workdir, path.name, saved, config)
  check_description(path, results["task_description"], description)
  return None if _differences(saved, config) else results


def check_description(path: Path, saved: Plain, now: Plain) -> None:
  """Raises UserError if numbers belong to other data or another protocol.

  Args:
    path: file or checkpoint that holds the numbers.
    saved: description of the task that was saved with the numbers.
    now: description of the task of this run; see `Task.description`.
  """
  differing = [
    f"{key}: {saved.get(key)!r} -> {now.get(key)!r}"
    for key in sorted(saved.keys() | now.keys())
    if saved.get(key) != now.get(key)
  ]
  if differing:
    raise UserError(
      f"{path} belongs to other data, or to another protocol:\n  "
      + "\n  ".join(differing)
      + "\nUse the data that it was trained on, or another --workdir."
    )
