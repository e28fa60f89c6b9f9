"""Rules by which a run goes on in a workdir that is not empty."""

from __future__ import annotations

import contextlib
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
from jaxformers import models, workdirs
from jaxformers.errors import UserError
from jaxformers.training import disk, optim

# Characters that orbax takes for patterns or separators.
REFUSED = "*?[\\"


def check_writable(workdir: Path) -> None:
  """Makes a workdir, and checks that it can hold a run.

  Raises:
    UserError: for an address, a path that orbax could not read, or a folder
      that cannot be written.
    OSError: for a disk that is full or absent, which may pass.
  """
  text = str(workdir)
  # "gs://bucket" is "gs:/bucket" as a Path.
  if any(part.endswith(":") for part in workdir.parts):
    raise UserError(
      f"The workdir {text!r} is the address of a store: give the --workdir as "
      "a folder of a file system, such as one where the store is mounted."
    )
  # Characters that orbax could not find again.
  bad = next((character for character in REFUSED if character in text), None)
  if bad:
    raise UserError(
      f"The workdir {text!r} has {bad!r} in its path, with which checkpoints "
      "could not be read again: choose a --workdir without any of "
      f"{' '.join(REFUSED)}."
    )
  # Write a file, as any error is better told now than after training.
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f".writable-{jax.process_index()}"
    probe.touch()
    probe.unlink()
  except OSError as error:
    is_forbidden = error.errno in (errno.EACCES, errno.EROFS)
    if disk.error_number(error) and not is_forbidden:
      raise  # It may pass.
    raise UserError(
      f"The workdir {workdir} cannot be written ({error.strerror}): choose "
      "another --workdir."
    ) from None


def check_trained(workdir: Path) -> None:
  """Raises UserError if there is no run in a workdir."""
  if not (workdir / "config.json").exists():
    raise UserError(
      f"There is no run in {workdir}, for it has no config.json: give the "
      "--workdir of a run. If this is one, its training command writes the "
      "file anew."
    )


def has_checkpoints(workdir: Path) -> bool:
  """Returns True if any checkpoint is whole.

  orbax names one that is not whole with more than its step.
  """
  folders = (workdir / "checkpoints").glob("[0-9]*")
  return any(path.name.isdigit() for path in folders)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Locks a workdir, so that no second run writes there.

  The operating system releases the lock when the process ends, however it ends.
  Called by the first of several processes.

  Raises:
    UserError: if another process holds the lock; it names host, process and
      since when.
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
  # Without locks a run still trains.
  except (OSError, NotImplementedError) as error:
    print(
      f"The file system of {workdir} has no locks ({error}): make sure that no "
      "second run works there.",
      file=sys.stderr,
    )
    yield
    return
  # Tell others who holds it.
  try:
    content = {
      "host": socket.gethostname(),
      "process": os.getpid(),
      "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    with contextlib.suppress(OSError):  # The lock holds on a full disk, too.
      holder.write_text(json.dumps(content))
    yield
  finally:
    holder.unlink(missing_ok=True)
    lock.release()


def _holder(path: Path) -> str:
  """Returns who holds the lock, as a phrase."""
  for _ in range(10):  # The holder may not have written it yet.
    try:
      holder = json.loads(path.read_text())
      process, host = holder["process"], holder["host"]
      return f"process {process} on {host} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
      time.sleep(0.1)
  return "another process"


def check_workdir(workdir: Path, config: Mapping[str, Any]) -> None:
  """Raises UserError if a workdir holds results or checkpoints of another run.

  Args:
    workdir: workdir of the run.
    config: plain and complete.
  """
  # Results know their config; config.json may be of a run that never began.
  results = (workdir / "results.json").exists()
  if results:
    saved = workdirs.read_results(workdir)["config"]
    if not _differences(saved, config):
      return  # config.json may be of a longer run that was begun since.
    _check_goes_on(workdir, "results.json", saved, config)
  begun = results or has_checkpoints(workdir)
  if begun and (workdir / "config.json").exists():
    saved = workdirs.read_config(workdir)
    _check_goes_on(workdir, "config.json", saved, config)


def check_checkpoint(
  folder: Path, meta: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
  """Raises UserError if a checkpoint was saved under another config.

  Args:
    folder: folder of the checkpoint, in `workdir`/checkpoints.
    meta: content of the checkpoint beside its state.
    config: config of the run, plain and complete.
  """
  workdir, name = folder.parents[1], f"checkpoints/{folder.name}"
  saved = meta["config"]
  _check_goes_on(workdir, name, saved, config)
  before, step = saved["total_steps"], meta["step"]
  # The last step is always evaluated, and counts to best and patience.
  if step == before < config["total_steps"] and step % saved["eval_steps"]:
    raise UserError(
      f"The run in {workdir} ended at step {step} with an evaluation that a "
      f"longer one would not have, for config.eval_steps={saved['eval_steps']} "
      "does not divide it: train the longer one in another --workdir."
    )


def _check_goes_on(
  workdir: Path,
  name: str,
  saved: Mapping[str, Any],
  config: Mapping[str, Any],
) -> None:
  """Raises UserError if a run of a saved config cannot go on under another.

  It can with more steps, unless the schedule ends with the run, and with more
  patience. Fields that change no number may differ.
  """
  before, hint = configs.complete(saved), ""
  # More steps.
  schedule = config["schedule"]["name"]
  if before["total_steps"] < config["total_steps"]:
    if not optim.ends_with_run(schedule):
      before["total_steps"] = config["total_steps"]
    else:
      hint = (
        f"\nThe schedule {schedule!r} ends with the run, so that this one "
        "cannot be made longer; one of a constant or rsqrt schedule can."
      )
  # More patience, of which 0 is endless.
  if before["patience"] and not 0 < config["patience"] < before["patience"]:
    before["patience"] = config["patience"]
  differing = _differences(before, config)
  if differing:
    raise UserError(
      f"The workdir {workdir} belongs to a run of another config ({name}):\n  "
      + "\n  ".join(differing)
      + f"{hint}\nUse that config again, or choose another --workdir."
    )


def _differences(
  saved: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
  """Returns the fields that differ, of those that change numbers."""
  # A default may be named in a config or not.
  before = models.resolve_defaults(configs.complete(saved))
  return configs.differences(before, models.resolve_defaults(config))


def finished_results(
  workdir: Path, config: Mapping[str, Any], description: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Returns the results of a finished run, or None if training continues.

  It continues if there are none, or if they have fewer steps or less patience.

  Args:
    workdir: workdir of the run.
    config: plain and complete.
    description: description of the task; see `Task.description`.

  Raises:
    UserError: for results of another config, of other data, or damaged ones.
  """
  if not (workdir / "results.json").exists():
    return None
  results = workdirs.read_results(workdir)
  _check_goes_on(workdir, "results.json", results["config"], config)
  check_description(
    workdir / "results.json", results["task_description"], description
  )
  return None if _differences(results["config"], config) else results


def check_description(
  path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
  """Raises UserError if numbers are of other data, or of another protocol.

  Args:
    path: file or checkpoint that holds the numbers.
    saved: description of the task, saved with the numbers.
    now: description of the task of the run; see `Task.description`.
  """
  differing = [
    f"{key}: {saved.get(key)!r} -> {now.get(key)!r}"
    for key in sorted(saved.keys() | now.keys())
    if saved.get(key) != now.get(key)
  ]
  if differing:
    raise UserError(
      f"{path} is of other data, or of another protocol:\n  "
      + "\n  ".join(differing)
      + "\nUse the data that it was trained on, or another --workdir."
    )
