"""Runs of a grid as jobs of Slurm, which submitit submits as one array."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers.foundations import durable, requirements
from jaxformers.foundations.errors import UserError
from jaxformers.sweep.commands import SECONDS_TO_SAVE, Job
from jaxformers.sweep.grid import Cell
from jaxformers.sweep.runs import Sweep

Parameters = Mapping[str, int | str]

MAX_REQUEUES = 20  # Number of times a job may reach its limit and continue.
DEFAULTS = {
  "job_name": "jaxformers",
  "time": 24 * 60,
  "ntasks_per_node": 1,
  # A job that has saved is requeued, also where the default is not to.
  "additional_parameters": {"requeue": True},
  # Since Slurm 22.05, srun does not inherit sbatch's --cpus-per-task.
  "setup": ["export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"],
}


def parse_parameters(text: str) -> dict[str, int | str]:
  """Parses "KEY=VALUE,KEY=VALUE"; values of digits become integers.

  Raises:
    UserError: for a text of another form.
  """
  parameters: dict[str, int | str] = {}
  for item in text.split(",") if text else ():
    key, equals, value = item.partition("=")
    if not key or not equals or not value:
      raise UserError(f"--slurm {text}: {item!r} is not KEY=VALUE.")
    if not value.isprintable():  # A line break would add a line to the script.
      raise UserError(f"--slurm {key}={value!r}: give a printable value.")
    # submitit takes numbers as integers.
    is_number = value.isascii() and value.isdigit()
    parameters[key] = int(value) if is_number else value
  return parameters


def _check_parameters(parameters: Parameters) -> None:
  # Check the types of the parameters that a sweep itself reads.
  for name, noun in {"nodes": "number", "time": "number of minutes"}.items():
    if not isinstance(parameters.get(name, 1), int):
      raise UserError(f"--slurm {name}={parameters[name]}: give a {noun}.")
  if parameters.get("ntasks_per_node", 1) != 1:
    raise UserError(
      f"--slurm ntasks_per_node={parameters['ntasks_per_node']}: remove it, "
      "since a run is one process a node, which uses all of its devices."
    )


def _make_executor(
  folder: Path, parameters: Parameters, *, dry_run: bool = False
) -> Any:
  """Returns submitit's executor, with its scripts and logs in a folder.

  Args:
    folder: folder of the scripts and logs.
    parameters: parameters of the jobs.
    dry_run: True for an executor that needs no Slurm and submits nothing.
  """
  requirements.require("slurm", "--slurm")
  import submitit

  class Printer(submitit.SlurmExecutor):
    """Executor that makes scripts without the programs of Slurm."""

    @classmethod
    def affinity(cls) -> int:
      return 1

  make = Printer if dry_run else submitit.SlurmExecutor
  try:
    executor = make(folder / "%j", max_num_timeout=MAX_REQUEUES)
    # Send the signal early enough before the time limit to save.
    executor.update_parameters(
      **DEFAULTS | dict(parameters), signal_delay_s=SECONDS_TO_SAVE + 20
    )
  except (RuntimeError, ValueError) as error:
    raise UserError(f"--slurm: {error}") from None
  return executor


class SlurmSweep(Sweep):
  """Runs of a grid in a workdir, submitted all at once as jobs of Slurm."""

  def __init__(
    self,
    workdir: Path,
    overrides: Sequence[str],
    parameters: Parameters,
    *,
    dry_run: bool = False,
  ) -> None:
    """Prepares to submit jobs.

    Args:
      workdir: folder that holds the workdirs of all runs.
      overrides: arguments that are passed to every run.
      parameters: parameters of the jobs, from `parse_parameters`.
      dry_run: True for a sweep that only prints its script.

    Raises:
      UserError: for unknown parameters, or if jobs are submitted without Slurm.
    """
    # A job need not start in the folder from which it was submitted.
    super().__init__(workdir.absolute(), overrides)
    _check_parameters(parameters)
    folder = self.workdir / "slurm"
    self._executor = _make_executor(folder, parameters, dry_run=dry_run)
    self._nodes = int(parameters.get("nodes", 1))
    self._ids_path = folder / "jobs.json"  # Id of the latest job, by workdir.
    self._jobs: dict[str, Any] = {}

  def command(self, cell: Cell, seed: int) -> list[str]:
    """Returns the command of a run; on several nodes its processes join."""
    distributed = ["--distributed"] if self._nodes > 1 else []
    return [*super().command(cell, seed), *distributed]

  def show(self, pairs: Sequence[tuple[Cell, int]]) -> None:
    """Prints the commands of the jobs, and the script that sbatch would get."""
    super().show(pairs)
    # submitit has no public function for the text of its script.
    if count := len(self.pending(pairs)):
      executor = self._executor
      if count > 1:
        executor.parameters["map_count"] = count
      command = executor._submitit_command_str
      print(executor._make_submission_file_text(command, uid=""))

  def submit(self, pairs: Sequence[tuple[Cell, int]]) -> None:
    """Submits the runs that have no results and are not queued yet."""
    ids = {}
    if self._ids_path.exists():
      ids = json.loads(self._ids_path.read_text(encoding="utf-8"))
    # Find jobs that an earlier sweep submitted, and runs without a job.
    new: dict[str, Job] = {}
    queued: dict[str, Any] = {}
    for cell, seed in pairs:
      folder = str(self.folder(cell, seed))
      if folder in self._jobs or self.read_results(cell, seed) is not None:
        continue
      if folder in ids and (job := self._find_job(ids[folder])):
        queued[folder] = job
      else:
        new[folder] = Job(self.command(cell, seed))
    # Submit the new jobs as one array, and remember their ids.
    started: dict[str, Any] = {}
    if new:
      import submitit

      try:
        with self._executor.batch():
          for folder, job in new.items():
            started[folder] = self._executor.submit(job)
      except submitit.core.utils.FailedJobError as error:
        raise UserError(f"--slurm: {str(error).strip()}") from None
      ids |= {folder: job.job_id for folder, job in started.items()}
      durable.write_json(self._ids_path, ids)
    self._jobs |= queued | started
    if queued or new:
      print(
        f"{len(new)} jobs submitted, {len(queued)} were queued before; their "
        f"logs are in {self._ids_path.parent}. Jobs continue when the sweep is "
        "stopped.",
        flush=True,
      )

  def _find_job(self, job_id: str) -> Any | None:
    """Returns the job of an id; None if it has ended or Slurm has lost it."""
    # A job has one task per node, numbered from 0.
    nodes = list(range(self._nodes))
    job = self._executor.job_class(self._executor.folder, job_id, nodes)
    is_done = job.done(force_check=True)
    # submitit may not notice that Slurm lost a job: ask Slurm as well.
    return None if is_done or not _is_queued(job.job_id) else job

  def train(self, cell: Cell, seed: int) -> int | str:
    """Waits for the job of a run; returns its status, or why there is none."""
    job = self._jobs[str(self.folder(cell, seed))]
    try:
      # Each node returns a status; take the first that is not 0.
      status = next(filter(None, job.results()), 0)
      # A shared file system may show the results with a delay.
      for _ in range(60):
        if status or self.read_results(cell, seed) is not None:
          return status
        time.sleep(1)
      return f"job {job.job_id} ended with 0 and left no results"
    except Exception as error:  # A job may raise any kind of error.
      last = str(error).strip().splitlines()[-1:]
      return f"job {job.job_id} {job.state}: {''.join(last)}"


def _is_queued(job_id: str) -> bool:
  """Returns True if Slurm knows a job, or if Slurm cannot be asked."""
  command = ["squeue", "--noheader", "--jobs", job_id]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
  except OSError:
    # A job that may still run must not be started twice.
    return True
  # Slurm does not know the id of a job that ended long ago.
  if done.returncode:
    return "invalid job id" not in done.stderr.lower()
  return bool(done.stdout.strip())
