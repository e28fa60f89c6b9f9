"""Writers of metrics: metrics.jsonl always, TensorBoard and W&B on request."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformers.config import RunConfig
from jaxformers.foundations import durable, requirements, workdirs
from jaxformers.training import disk, processes


def _cut_metrics(workdir: Path, step: int) -> None:
  """Removes the records after a step from `metrics.jsonl`.

  The file is replaced as a whole. Damaged lines are dropped with a warning.
  """
  path = workdir / "metrics.jsonl"
  if step and not path.exists():
    processes.warn(
      f"{path} is missing: the metrics up to step {step} are lost."
    )
  path.touch()
  records, damaged = workdirs.read_metrics(workdir)
  if damaged:
    first = ", ".join(map(str, damaged[:5]))
    more = ", ..." if len(damaged) > 5 else ""
    processes.warn(f"{path}: damaged lines were left out ({first}{more}).")
  # Rewrite the file only if there are records to remove.
  kept = [record for record in records if record["step"] <= step]
  text = "".join(workdirs.metrics_line(r["step"], r) for r in kept)
  if text.encode() != path.read_bytes():
    durable.write_text(path, text)


def _wandb_id(workdir: Path) -> str:
  """Returns the id of a workdir's run at W&B, which the first call creates.

  If the folder is deleted, a new one gets another id, and so another W&B run.
  """
  path = workdir / "wandb.json"
  if not path.exists():
    durable.write_json(path, {"id": secrets.token_hex(8)})
  return str(json.loads(path.read_text(encoding="utf-8"))["id"])


def _wandb_names(config: RunConfig, protocol: str) -> dict[str, Any]:
  """Returns project, name, group and tags of a run at W&B.

  A name is left out if its environment variable is set, which W&B reads.
  """
  task, model = config.task.name, config.model.name
  names = {
    "WANDB_PROJECT": ("project", "jaxformers"),
    "WANDB_NAME": ("name", f"{task}-{model}-{config.seed}"),
    "WANDB_RUN_GROUP": ("group", f"{task}/{protocol}"),
    "WANDB_TAGS": ("tags", [task, model]),
  }
  return dict(
    default
    for variable, default in names.items()
    if not os.environ.get(variable)
  )


class Writers:
  """Writes the scalars of a step to every log that the config names.

  A resumed run first removes the records after its step from `metrics.jsonl`,
  so that no step occurs twice. Only the first of several processes writes.

  Args:
    workdir: workdir of the run.
    step: step that the run starts from.
    config: config of the run.
    protocol: protocol of the task, a part of the group at W&B.
  """

  def __init__(
    self,
    workdir: Path,
    step: int,
    config: RunConfig,
    protocol: str = "",
  ) -> None:
    self._workdir = workdir
    self._path = self._board = self._wandb = None
    if not processes.is_first():
      return
    # Report a missing library before anything is written.
    requirements.require_logs(config.logs)
    # Drop the records after the step: these steps are computed again.
    self._path = workdir / "metrics.jsonl"
    with disk.saving(self._path.name, workdir):
      _cut_metrics(workdir, step)
    # Open TensorBoard, which drops later records as well.
    if config.tensorboard:
      import tensorboardX

      self._board = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=step + 1 if step else None
      )
    # Begin a run at W&B, or continue it.
    if config.wandb:
      import wandb

      options = {"dir": str(workdir), "config": config.as_dict()}
      options |= _wandb_names(config, protocol)
      run_id = _wandb_id(workdir)
      self._wandb = wandb.init(id=run_id, resume="allow", **options)

  def __enter__(self) -> Writers:
    return self

  def __exit__(self, *_: object) -> None:
    if self._board:
      self._board.close()
    if self._wandb:
      self._wandb.finish()

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes the scalars of a step, under names such as "train/loss".

    Raises:
      OSError: if the disk is full or absent.
    """
    if self._path:
      line = workdirs.metrics_line(step, scalars).encode()
      with (
        disk.saving(f"Metrics of step {step}", self._workdir),
        # Not "ab", which would create a file that was deleted.
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

  def write_results(self, results: Mapping[str, Any]) -> None:
    """Writes the test scores into the summary of the run at W&B.

    Args:
      results: content of `results.json`.
    """
    if self._wandb:
      metric = results["metric"]
      scores = {f"test/{metric}": results[metric]}
      scores |= {key: results[key] for key in ("best_step", "parameters")}
      self._wandb.summary.update(scores)
