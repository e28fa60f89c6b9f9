"""Where metrics go: metrics.jsonl always, TensorBoard and wandb if asked."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformers import durable, workdirs
from jaxformers.errors import UserError
from jaxformers.training import processes
from jaxformers.training.store import Store


def _require(module: str, extra: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError:
    raise UserError(
      f"config.{extra} is on, but {module} is not installed: run "
      f"pip install 'jaxformers[{extra}]' or turn it off."
    ) from None


def _cut(folder: Path, step: int) -> None:
  """Leaves the records up to a step, in a file that is whole at any time.

  Lines that are damaged are left out, and told.
  """
  path = folder / "metrics.jsonl"
  if step and not path.exists():
    _tell(f"{path} is not there: the metrics up to step {step} are lost.")
  path.touch()
  records, damaged = workdirs.read_metrics(folder)
  if damaged:
    _tell(f"{path}: damaged lines were left out ({_numbers(damaged)}).")
  lines = []
  for record in records:
    if record["step"] <= step:
      scalars = {k: v for k, v in record.items() if k != "step"}
      lines.append(workdirs.metrics_line(record["step"], scalars))
  text = "".join(lines)
  if text.encode() != path.read_bytes():
    durable.write_text(path, text)


def _numbers(lines: list[int]) -> str:
  first = ", ".join(str(number) for number in lines[:5])
  return first + (", ..." if len(lines) > 5 else "")


def _tell(message: str) -> None:
  print(message, file=sys.stderr)


class Writers:
  """Writes scalars of a step to every place that the config names.

  A run that is taken up again first cuts `metrics.jsonl` back to the step it
  starts from, so no step stands there twice. Of several processes the first
  alone writes.
  """

  def __init__(
    self, store: Store, step: int, config: Mapping[str, Any]
  ) -> None:
    self._store, workdir = store, store.folder
    self._path = self._board = self._wandb = None
    if not processes.is_first():
      return
    board = wandb = None
    if config["tensorboard"]:
      board = _require("tensorboardX", "tensorboard")
    if config["wandb"]:
      wandb = _require("wandb", "wandb")
    path = workdir / "metrics.jsonl"
    store.patiently(path.name, lambda: _cut(workdir, step))
    self._path, self._end = path, path.stat().st_size
    if board:
      self._board = board.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=step + 1 if step else None
      )
    if wandb:
      self._wandb = wandb.init(
        dir=str(workdir),
        config=dict(config),
        resume="allow",
        id=hashlib.sha256(str(workdir).encode()).hexdigest()[:16],
      )

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
      OSError: if the store was in trouble for too long.
    """
    if self._path:
      line = workdirs.metrics_line(step, scalars).encode()

      def append() -> int:
        # Not "ab", which would make the file anew where it is not; and from
        # where the last whole line ends.
        with self._path.open("r+b") as file:
          file.truncate(self._end)
          file.seek(self._end)
          file.write(line)
          file.flush()
          os.fsync(file.fileno())
        return len(line)

      what = f"the metrics of step {step}"
      self._end += self._store.patiently(what, append)
    if self._board:
      for name, value in scalars.items():
        self._board.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log(dict(scalars), step=step)
