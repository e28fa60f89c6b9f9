"""Rules by which a run goes on in a workdir that holds something already."""

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

# Characters that the library of checkpoints takes for patterns or separators.
REFUSED = "*?[\\"


def check_writable(workdir: Path) -> None:
  """Makes a workdir, and raises ValueError if it cannot hold a run."""
  text = str(workdir)
  # Path makes one slash of two.
  if any(part.endswith(":") for part in workdir.parts):
    raise UserError(
      f"The workdir {text!r} is the address of a store: give the --workdir as "
      "a folder of a file system, such as one where the store is mounted."
    )
  bad = next((character for character in REFUSED if character in text), None)
  if bad:
    raise UserError(
      f"The workdir {text!r} has {bad!r} in its path, with which checkpoints "
      "could not be read again: choose a --workdir without any of "
      f"{' '.join(REFUSED)}."
    )
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
  """True if any checkpoint is whole; others have more in their names."""
  folders = (workdir / "checkpoints").glob("[0-9]*")
  return any(path.name.isdigit() for path in folders)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Holds a workdir, so that no second run writes there.

  The operating system gives the lock back when the process ends, however it
  does. Called by the first of several processes.

  Raises:
    BlockingIOError: if another process holds it; names host, process and since
      when.
  """
  lock = filelock.FileLock(workdir / ".lock", timeout=0)
  holder = workdir / ".lock.json"
  try:
    lock.acquire()
  except filelock.Timeout:
    raise BlockingIOError(
      f"The workdir {workdir} is in use by {_holder(holder)}: wait until that "
      "run has ended, or choose another --workdir."
    ) from None
  except (OSError, NotImplementedError) as error:
    print(
      f"The file system of {workdir} has no locks ({error}): take care that no "
      "second run works there.",
      file=sys.stderr,
    )
    yield
    return
  try:
    told = {
      "host": socket.gethostname(),
      "process": os.getpid(),
      "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    with contextlib.suppress(OSError):  # A full disk keeps nobody from it.
      holder.write_text(json.dumps(told))
    yield
  finally:
    holder.unlink(missing_ok=True)
    lock.release()


def _holder(path: Path) -> str:
  """Returns who holds the lock, as a phrase."""
  for _ in range(10):  # The holder may not have written it yet.
    try:
      told = json.loads(path.read_text())
      return (
        f"process {told['process']} on {told['host']} since {told['since']}"
      )
    except (OSError, ValueError, KeyError, TypeError):
      time.sleep(0.1)
  return "another process"


def check_config(workdir: Path, config: Mapping[str, Any]) -> None:
  """Raises UserError if anything was computed there under another config.

  Args:
    workdir: workdir of the run.
    config: plain and complete.
  """
  results = (workdir / "results.json").exists()
  if results:
    saved = workdirs.read_results(workdir)["config"]
    if not _differences(saved, config):
      return  # Others may have begun to make the run longer.
    _check_same(workdir, "results.json", saved, config)
  begun = results or has_checkpoints(workdir)
  if begun and (workdir / "config.json").exists():
    saved = workdirs.read_config(workdir)
    _check_same(workdir, "config.json", saved, config)


def check_checkpoint(
  folder: Path, meta: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
  """Raises UserError if a checkpoint was saved under another config.

  Args:
    folder: folder of the checkpoint, in `workdir`/checkpoints.
    meta: what it holds beside its state.
    config: config of this run, plain and complete.
  """
  workdir, name = folder.parents[1], f"checkpoints/{folder.name}"
  saved = meta["config"]
  _check_same(workdir, name, saved, config)
  before, step = saved["total_steps"], meta["step"]
  # The last step is evaluated in any case, and counts to best and patience.
  if step == before < config["total_steps"] and step % saved["eval_steps"]:
    raise UserError(
      f"The run in {workdir} ended at step {step} with an evaluation that a "
      f"longer one would not have, for config.eval_steps={saved['eval_steps']} "
      "does not divide it: train the longer one in another --workdir."
    )


def _check_same(
  workdir: Path,
  name: str,
  saved: Mapping[str, Any],
  config: Mapping[str, Any],
) -> None:
  """Raises UserError if a config is not the saved one, or one that goes on.

  More steps go on, unless the schedule ends with the run; so does more
  patience. Fields that change no number may differ.
  """
  before, more = configs.complete(saved), ""
  schedule = config["schedule"]["name"]
  if before["total_steps"] < config["total_steps"]:
    if not optim.ends_with_run(schedule):
      before["total_steps"] = config["total_steps"]
    else:
      more = (
        f"\nThe schedule {schedule!r} ends with the run, so that this one "
        "cannot be made longer; one of a constant or rsqrt schedule can."
      )
  if before["patience"] and not 0 < config["patience"] < before["patience"]:
    before["patience"] = config["patience"]  # More of it goes on.
  differing = _differences(before, config)
  if differing:
    raise UserError(
      f"The workdir {workdir} belongs to a run of another config ({name}):\n  "
      + "\n  ".join(differing)
      + f"{more}\nUse that config again, or choose another --workdir."
    )


def _differences(
  saved: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
  """Returns the fields in which two configs differ that change numbers."""
  before = models.resolve_defaults(configs.complete(saved))
  return configs.differences(before, models.resolve_defaults(config))


def finished_results(
  workdir: Path, config: Mapping[str, Any], description: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Returns the results of this very run, or None if it has none yet.

  Results of fewer steps, or of less patience, are not those of this run, which
  goes on.

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
  _check_same(workdir, "results.json", results["config"], config)
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
    saved, now: what `Task.description` returned then and returns now.
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
