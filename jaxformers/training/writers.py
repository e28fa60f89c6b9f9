"""Writers of metrics: metrics.jsonl always, TensorBoard and wandb if asked."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformers import durable, workdirs
from jaxformers.errors import UserError
from jaxformers.training import disk, processes


def _import_optional(module: str, extra: str) -> Any:
  """Imports the library of an extra of setup.cfg, or says how to install it."""
  try:
    return importlib.import_module(module)
  except ImportError:
    raise UserError(
      f"config.{extra} is on, but {module} is not installed: run "
      f"pip install 'jaxformers[{extra}]' or turn it off."
    ) from None


def _cut_metrics(workdir: Path, step: int) -> None:
  """Removes the records after a step, replacing the file as a whole.

  Damaged lines are left out, with a message.
  """
  path = workdir / "metrics.jsonl"
  if step and not path.exists():
    processes.warn(
      f"{path} is not there: the metrics up to step {step} are lost."
    )
  path.touch()
  records, damaged = workdirs.read_metrics(workdir)
  if damaged:
    first = ", ".join(map(str, damaged[:5]))
    more = ", ..." if len(damaged) > 5 else ""
    processes.warn(f"{path}: damaged lines were left out ({first}{more}).")
  # Write the file again if it holds more than the records to keep.
  kept = [record for record in records if record["step"] <= step]
  text = "".join(workdirs.metrics_line(r["step"], r) for r in kept)
  if text.encode() != path.read_bytes():
    durable.write_text(path, text)


class Writers:
  """Writes scalars of a step to every place that the config names.

  A resumed run first removes the records after its step from `metrics.jsonl`,
  so that no step occurs twice. Of several processes only the first one writes.

  Args:
    workdir: workdir of the run.
    step: step that the run starts from.
    config: config of the run, of which `tensorboard` and `wandb` are read.
  """

  def __init__(self, workdir: Path, step: int, config: dict[str, Any]) -> None:
    self._workdir = workdir
    self._path = self._board = self._wandb = None
    if not processes.is_first():
      return
    # A library that is missing is an error before anything is written.
    board, wandb = (
      _import_optional(module, extra) if config[extra] else None
      for module, extra in (("tensorboardX", "tensorboard"), ("wandb", "wandb"))
    )
    # Records after the step are computed again.
    self._path = workdir / "metrics.jsonl"
    with disk.saving(self._path.name, workdir):
      _cut_metrics(workdir, step)
    if board:
      self._board = board.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=step + 1 if step else None
      )
    if wandb:
      name = str(workdir)
      identity = hashlib.sha256(name.encode()).hexdigest()[:16]
      options = {"dir": name, "config": dict(config), "resume": "allow"}
      self._wandb = wandb.init(id=identity, **options)

  def __enter__(self) -> Writers:
    return self

  def __exit__(self, *_: object) -> None:
    if self._board:
      self._board.close()
    if self._wandb:
      self._wandb.finish()

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes scalars, named like "train/loss".

    Raises:
      OSError: if the disk is full or absent.
    """
    if self._path:
      line = workdirs.metrics_line(step, scalars).encode()
      with (
        disk.saving(f"Metrics of step {step}", self._workdir),
        # Not "ab": it would create a file that was deleted.
        self._path.open("r+b") as file,
      ):
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if self._board:
      for name, value in scalars.items():
        self._board.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log(dict(scalars), step=step)
