"""Runs of a grid in a workdir: their configs, their results, and tuning."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxformers import config as configs
from jaxformers import tasks
from jaxformers.config import RunConfig
from jaxformers.foundations import paths, requirements
from jaxformers.foundations.errors import UserError
from jaxformers.sweep import commands
from jaxformers.sweep.grid import Axis, Cell
from jaxformers.training import origin, resume
from jaxformers.training.run import check_fields

MAIN = (sys.executable, "-m", "jaxformers.main")
DIVERGED = 2  # Status of a run whose loss is not finite.


class Sweep:
  """Runs of a grid in a workdir, one at a time.

  Attributes:
    workdir: folder that holds the workdirs of all runs.
    overrides: arguments that are passed to every run.
    failed: exit status or reason of failure of each run, by its folder.
    missing: reason why the data of a cell are not available, by its title.
  """

  def __init__(self, workdir: Path, overrides: Sequence[str]) -> None:
    self.workdir = workdir
    self.overrides = list(overrides)
    self.failed: dict[str, int | str] = {}
    self.missing: dict[str, str] = {}
    self._tasks: dict[str, tasks.Task | UserError] = {}

  def load_config(self, cell: Cell, seed: int) -> RunConfig:
    """Returns the config of a run, as `jaxformers.main` reads it.

    Raises:
      UserError: for an argument or a field that the config does not have.
    """
    overrides = [*self.overrides, *cell.options]
    config = configs.load_with(cell.spec, overrides)
    config.seed = seed
    complete = configs.complete(config)
    # Weights that another run of the sweep will write may not exist yet.
    folder = self.folder(cell, seed)
    weights = paths.expand(complete["pretrained"])
    files = ("config.json", "model.json")
    is_there = any((weights / name).exists() for name in files)
    if not is_there and not (folder / "config.json").exists():
      return RunConfig.from_dict(complete)
    # Take the fields that the weights determine.
    chosen = configs.values_of(overrides)
    return RunConfig.from_dict(origin.take_fields(complete, folder, chosen))

  def open_task(self, config: RunConfig) -> tasks.Task:
    """Returns the task of a config; prepares its data if necessary.

    Raises:
      UserError: for data that are not available.
    """
    # Runs that differ in model or seed share their task.
    options = {"name": config.task.name, **config.task_options}
    key = json.dumps(options, sort_keys=True, default=str)
    if key not in self._tasks:
      try:
        self._tasks[key] = tasks.get(**options)
      except UserError as error:
        self._tasks[key] = error
    task = self._tasks[key]
    if isinstance(task, UserError):
      raise task
    return task

  def describe_task(self, config: RunConfig) -> dict[str, Any]:
    """Returns the description of a config's task, on which results depend.

    Raises:
      UserError: for data that are not available.
    """
    return self.open_task(config).description()

  def read_results(self, cell: Cell, seed: int) -> dict[str, Any] | None:
    """Returns the results of a run, or None if it has none.

    Raises:
      UserError: for results of another config, or of other data.
    """
    folder, config = self.folder(cell, seed), self.load_config(cell, seed)
    if not (folder / "results.json").exists():
      return None  # Do not prepare the data of a run without results.
    description = self.describe_task(config)
    return resume.finished_results(folder, config, description)

  def check(
    self, cells: Sequence[Cell], seeds: Sequence[int], *, open_data: bool = True
  ) -> list[Cell]:
    """Returns the cells whose data are available; `missing` gets the others.

    Results of finished runs are read, which checks their configs.

    Args:
      cells: cells of the grid.
      seeds: seeds of every cell.
      open_data: False to read neither the data nor the results of runs.

    Raises:
      UserError: if a run could not start for another reason than its data, if a
        run is listed twice, or if no data are available.
    """
    check_seeds(seeds)
    # Check all configs before any data are prepared.
    cell_configs = [self.load_config(cell, seeds[0]) for cell in cells]
    for config in cell_configs:
      check_fields(config)
      requirements.require_logs(config.logs)
    _check_distinct(cells, cell_configs)
    if not open_data:
      return list(cells)
    # Prepare the data, and read the results that exist.
    runnable = []
    for cell, config in zip(cells, cell_configs, strict=True):
      try:
        self.describe_task(config)
      except UserError as error:
        self.missing[cell.title] = str(error)
        continue
      runnable.append(cell)
      for seed in seeds:
        self.read_results(cell, seed)
    if not runnable:
      raise UserError("\n".join(dict.fromkeys(self.missing.values())))
    return runnable

  def run(self, cell: Cell, seed: int) -> dict[str, Any] | None:
    """Returns the results of a run; trains the run first if it has none.

    A run that fails returns None and is added to `failed`.
    """
    try:
      results = self.read_results(cell, seed)
      if results is None:
        status: int | str = self.train(cell, seed)
        # The results, not the exit status, decide whether a run is done.
        results = self.read_results(cell, seed)
    except UserError as error:  # Files may have changed since the check.
      results, status = None, str(error)
    if results is None:
      self.failed[str(self.folder(cell, seed))] = status
    return results

  def train(self, cell: Cell, seed: int) -> int | str:
    """Trains and scores a run; returns its exit status, or why it has none."""
    folder = self.folder(cell, seed)
    print(f"\n== {cell.title} seed {seed} -> {folder}", flush=True)
    return commands.call(self.command(cell, seed))

  def submit(self, pairs: Sequence[tuple[Cell, int]]) -> None:
    """Announces the next runs (cell, seed), which Slurm starts at once."""

  def show(self, pairs: Sequence[tuple[Cell, int]]) -> None:
    """Prints the commands of runs (cell, seed) without results; runs none."""
    for cell, seed in self.pending(pairs):
      print(shlex.join(self.command(cell, seed)))

  def pending(
    self, pairs: Sequence[tuple[Cell, int]]
  ) -> list[tuple[Cell, int]]:
    """Returns the pairs (cell, seed) whose folder has no results."""
    return [
      (cell, seed)
      for cell, seed in pairs
      if not (self.folder(cell, seed) / "results.json").exists()
    ]

  def command(self, cell: Cell, seed: int) -> list[str]:
    """Returns the command of a run."""
    paths = ["--config", cell.spec, f"--workdir={self.folder(cell, seed)}"]
    fields = [f"--config.seed={seed}", *self.overrides, *cell.options]
    return [*MAIN, *paths, *fields]

  def tune(self, cell: Cell, axis: Axis, seed: int) -> Cell | None:
    """Returns the cell with the best value of an axis; None without one.

    There is none if all values diverge, or if a run fails for another reason.
    """
    key, values = axis
    before = dict(self.failed)
    # Run every value with the first seed, and keep the results.
    every = {v: self.run(cell.extended(key, v), seed) for v in values}
    results = {value: result for value, result in every.items() if result}
    failed = {k: v for k, v in self.failed.items() if k not in before}
    if not results or any(status != DIVERGED for status in failed.values()):
      return None
    # A value that diverges is a result of tuning, not a failure of the sweep.
    left_out, self.failed = failed.keys(), before
    # Choose the best value, and print all scores. A higher score is better. The
    # score of a loss is its negative, which `abs` undoes.
    scores = {value: r["selection_score"] for value, r in results.items()}
    best = max(scores, key=scores.__getitem__)
    select = results[best]["config"]["select"]
    listed = ", ".join(f"{value}: {abs(x):.4f}" for value, x in scores.items())
    print(f"\n== {cell.title}: {key}={best}, by {select}: {listed}", flush=True)
    for folder in sorted(left_out):
      print(f"   Without results, and left out: {folder}")
    if best in find_ends(values):
      print(f"   {best} is at the end of the values: try more for {key}.")
    return cell.extended(key, best)

  def folder(self, cell: Cell, seed: int) -> Path:
    """Returns the workdir of a run."""
    return self.workdir / cell.folder / f"seed_{seed}"


def check_seeds(seeds: Sequence[int]) -> None:
  """Raises UserError unless there are seeds, which differ."""
  if not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0:
    raise UserError(
      f"--seeds={','.join(map(str, seeds))}: give seeds that differ and are "
      "not negative."
    )


def _check_distinct(
  cells: Sequence[Cell], cell_configs: Sequence[RunConfig]
) -> None:
  """Raises UserError for cells with equal configs or folders."""
  # Equal configs would train twice, and equal folders would mix their files.
  seen: dict[str, Cell] = {}
  for cell, config in zip(cells, cell_configs, strict=True):
    for key in (json.dumps(config.as_dict(), sort_keys=True), str(cell.folder)):
      if key in seen:
        raise UserError(
          f"{seen[key].title} and {cell.title} are one run: list every run "
          "once, and set no field of the grid by --config.FIELD=VALUE."
        )
      seen[key] = cell


def find_ends(values: Sequence[str]) -> tuple[str, ...]:
  """Returns the least and the greatest of numbers; () for other values."""
  try:
    ordered = sorted(values, key=float)
  except ValueError:
    return ()
  return (ordered[0], ordered[-1]) if len(ordered) > 1 else ()


def candidates(cells: Iterable[Cell], tuned: Axis | None) -> list[Cell]:
  """Returns the cells with every value of the tuned axis, if there is one."""
  if tuned is None:
    return list(cells)
  key, values = tuned
  return [cell.extended(key, value) for cell in cells for value in values]


def run_grid(
  sweep: Sweep,
  cells: Sequence[Cell],
  tuned: Axis | None,
  seeds: Sequence[int],
  dry_run: bool = False,
) -> list[dict[str, Any]]:
  """Runs all cells of a grid with all seeds.

  Args:
    sweep: sweep that starts the runs.
    cells: cells from `grid.expand`, without the tuned axis.
    tuned: axis whose best value is chosen with the first seed, or None.
    seeds: seeds of every cell.
    dry_run: True to print the commands of runs without results, and to run
      nothing. With a tuned axis, only the commands of the first seed.

  Returns:
    The results of all runs, only with the chosen values.

  Raises:
    UserError: before the first run; see `Sweep.check`.
  """
  # Check all runs that may be started.
  runnable = sweep.check(candidates(cells, tuned), seeds, open_data=not dry_run)
  if dry_run:
    # The value for the other seeds is known only after tuning.
    first = seeds[:1] if tuned else seeds
    sweep.show([(cell, seed) for cell in runnable for seed in first])
    return []
  # Choose the best value of each cell with the first seed.
  chosen: Sequence[Cell | None] = runnable
  if tuned:
    cells = [
      cell for cell in cells if {*candidates([cell], tuned)}.issubset(runnable)
    ]
    sweep.submit([(cell, seeds[0]) for cell in runnable])
    chosen = [sweep.tune(cell, tuned, seeds[0]) for cell in cells]
  # Run the cells with all seeds.
  pairs = [(cell, seed) for cell in chosen if cell for seed in seeds]
  sweep.submit(pairs)
  results = [sweep.run(cell, seed) for cell, seed in pairs]
  return [result for result in results if result is not None]
