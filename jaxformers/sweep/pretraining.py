"""Pre-training and fine-tuning within one budget of steps."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.foundations.tables import markdown_table
from jaxformers.models.config import NEXT
from jaxformers.models.transplant import CAUSAL_ADVICE, transplant
from jaxformers.sweep.grid import Cell, Pairs
from jaxformers.sweep.runs import Sweep, check_seeds
from jaxformers.tasks.reconstruction import OBJECTIVES

Result = Mapping[str, Any]
MakeSweep = Callable[[Path], Sweep]  # Takes the folder of the runs.


class Way(NamedTuple):
  """Split of a budget of steps between pre-training and fine-tuning.

  Attributes:
    objective: "masked" or "causal"; "" for training from scratch.
    share: share of the steps that are spent on pre-training.
  """

  objective: str = ""
  share: float = 0.0

  @property
  def title(self) -> str:
    """Name in tables, such as "masked 50%", or "none"."""
    return f"{self.objective} {self.share:.0%}" if self.share else "none"

  @property
  def folder(self) -> Path:
    """Folder of its runs, such as masked_0.5."""
    return Path(f"{self.objective}_{self.share:g}" if self.share else "scratch")


def ways(objectives: Sequence[str], shares: Sequence[float]) -> list[Way]:
  """Returns every objective with every share, and once the way from scratch.

  Raises:
    UserError: for an unknown objective, or a share outside of [0, 1).
  """
  for objective in objectives:
    choose("objective", objective, OBJECTIVES)
  for share in shares:
    if not 0 <= share < 1:
      raise UserError(
        f"--shares: {share:g} is not in [0, 1): give the share of the steps "
        "that are spent on pre-training, 0 for none."
      )
  every = [Way(o, share) for o in objectives for share in shares if share]
  chosen = [Way()] * (0 in shares) + list(dict.fromkeys(every))
  if not chosen:
    raise UserError("There is nothing to run: give --objectives and --shares.")
  return chosen


class Phase(NamedTuple):
  """Runs of one cell in one phase.

  Attributes:
    sweep: sweep that starts the runs.
    cell: cell of the runs, for all seeds.
  """

  sweep: Sweep
  cell: Cell

  def folder(self, seed: int) -> Path:
    """Returns the workdir of the run of a seed."""
    return self.sweep.folder(self.cell, seed)


def split_budget(total: int, share: float) -> tuple[int, int]:
  """Splits steps into pre-training and fine-tuning, at least one each.

  Raises:
    UserError: if the budget has fewer than two steps.
  """
  if total < 2:
    raise UserError(
      f"config.total_steps={total} cannot be divided: give at least 2."
    )
  before = min(max(round(total * share), 1), total - 1)
  return before, total - before


def _with(cell: Cell, sweep: Sweep, steps: int, *settings: Pairs) -> Cell:
  """Returns a cell with fewer steps, and proportionally fewer first steps.

  First steps are the warm-up, and the steps on short or easy examples.
  """
  config = sweep.load_config(cell, 0)
  fields: Pairs = (("total_steps", str(steps)),)
  if config.short_steps:
    short = max(config.short_steps * steps // config.total_steps, 1)
    fields += (("short_steps", str(short)),)
  schedule = config.schedule
  if warmup := schedule.warmup_steps:
    part = max(round(warmup * steps / config.total_steps), 1)
    fields += (("schedule.warmup_steps", str(part)),)
    if schedule.name == "rsqrt":
      # The peak is rate / sqrt(warm-up): scale the rate to keep the peak.
      rate = schedule.options["learning_rate"] * (part / warmup) ** 0.5
      fields += (("schedule.learning_rate", f"{rate:.6g}"),)
  more = tuple(pair for pairs in settings for pair in pairs)
  return dataclasses.replace(cell, settings=(*cell.settings, *fields, *more))


@dataclasses.dataclass
class Pretraining:
  """Runs cells in several ways, each way within the steps of its config.

  Attributes:
    make_sweep: function that returns the sweep of a folder.
    workdir: folder of all runs.
    first, second: fields of pre-training only, and of fine-tuning only.
    sweeps: sweeps that were made so far, kept for their failures.
  """

  make_sweep: MakeSweep
  workdir: Path
  first: Pairs = ()
  second: Pairs = ()
  sweeps: list[Sweep] = dataclasses.field(default_factory=list)

  def _sweep(self, *parts: Path | str) -> Sweep:
    self.sweeps.append(self.make_sweep(self.workdir.joinpath(*parts)))
    return self.sweeps[-1]

  def phases(self, way: Way, cells: Sequence[Cell]) -> list[list[Phase]]:
    """Returns the phases of a way; each phase lists the runs of every cell."""
    if not way.share:
      sweep = self._sweep(way.folder)
      return [[Phase(sweep, cell) for cell in cells]]
    # Split the steps of every cell between the two phases.
    before, after = (
      self._sweep(way.folder, name) for name in ("pretraining", "tuning")
    )
    phases: list[list[Phase]] = [[], []]
    for cell in cells:
      total = before.load_config(cell, 0).total_steps
      steps = split_budget(total, way.share)
      first = _with(cell, before, steps[0], self.first)
      first = first.extended("objective", way.objective)
      second = _with(cell, after, steps[1], self.second)
      phases[0].append(Phase(before, first))
      phases[1].append(Phase(after, second))
    return phases

  def check(
    self, chosen: Sequence[Way], cells: Sequence[Cell], seeds: Sequence[int]
  ) -> None:
    """Checks all runs of several ways before the first one starts.

    Raises:
      UserError: if a run could not start, or if fine-tuning could not take over
        the pre-trained encoder.
    """
    check_seeds(seeds)
    for way in chosen:
      # Check that every run could start.
      phases = self.phases(way, cells)
      for sweep, begun in _begin_all(phases, seeds):
        for seed in seeds:
          sweep.check([cell for cell, of in begun if of == seed], [seed])
      # Check that each phase can take over the encoder of the previous one.
      for runs in zip(*phases, strict=True):
        _check_transfer(runs)

  def run(
    self, way: Way, cells: Sequence[Cell], seeds: Sequence[int]
  ) -> list[list[tuple[int, list[Result]]]]:
    """Runs a way with all seeds.

    Returns:
      For each cell a list of (seed, results of all phases). A seed is left out
      if one of its phases has failed.
    """
    keys = [(i, seed) for i in range(len(cells)) for seed in seeds]
    done: dict[tuple[int, int], list[Result]] = {key: [] for key in keys}
    for sweep, begun in _begin_all(self.phases(way, cells), seeds):
      # Leave out the runs that failed in an earlier phase.
      runs = {k: b for k, b in zip(keys, begun, strict=True) if k in done}
      # Run the phase, and keep the runs that have results.
      sweep.submit([*runs.values()])
      results = {key: sweep.run(*pair) for key, pair in runs.items()}
      done = {
        key: [*before, result]
        for key, before in done.items()
        if (result := results[key]) is not None
      }
    # Sort the results by cell.
    return [
      [(seed, done[i, seed]) for seed in seeds if (i, seed) in done]
      for i in range(len(cells))
    ]

  def commands(
    self, way: Way, cells: Sequence[Cell], seeds: Sequence[int]
  ) -> list[list[str]]:
    """Returns the commands of all runs of a way, in the order of the runs."""
    phases = self.phases(way, cells)
    for phase in phases:
      phase[0].sweep.check([run.cell for run in phase], seeds, open_data=False)
    return [
      sweep.command(*pair)
      for sweep, begun in _begin_all(phases, seeds)
      for pair in begun
    ]


def _begin_all(
  phases: Sequence[Sequence[Phase]], seeds: Sequence[int]
) -> Iterator[tuple[Sweep, list[tuple[Cell, int]]]]:
  """Yields the sweep of each phase, with its cells and seeds.

  A run begins with the weights of the same cell and seed in the previous phase.
  """
  before: Sequence[Phase | None] = [None] * len(phases[0])
  for phase in phases:
    yield (
      phase[0].sweep,
      [
        (_begun(run, first, seed), seed)
        for run, first in zip(phase, before, strict=True)
        for seed in seeds
      ],
    )
    before = phase


def _check_transfer(phases: Sequence[Phase]) -> None:
  """Raises UserError if a phase cannot take over the encoder of the previous.

  Args:
    phases: successive phases of a cell.
  """
  # Open the task and the parameter shapes of every phase.
  opened = []
  for sweep, cell in phases:
    config = sweep.load_config(cell, 0)
    task = sweep.open_task(config)
    model = models.build(**vars(config.model), **task.sizes())
    # Only shapes matter, and zeros take no memory until they are read.
    params = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype), models.shapes(model)
    )
    opened.append((task, params))
  # Transfer the zeros from each phase to the next one.
  for (source, first), (task, second) in itertools.pairwise(opened):
    leaves_next = source.objective in NEXT and task.objective not in NEXT
    transplant(
      second,
      first,
      image=task.image,
      vocabulary=task.vocabulary,
      source_vocabulary=source.vocabulary,
      name="The pre-trained model",
      advice=CAUSAL_ADVICE if leaves_next else "",
    )


def _begun(phase: Phase, before: Phase | None, seed: int) -> Cell:
  """Returns the cell of a run that begins with the weights of a phase."""
  if before is None:
    return phase.cell
  begin = (("pretrained", str(before.folder(seed))),)
  settings = (*phase.cell.settings, *begin)
  return dataclasses.replace(phase.cell, settings=settings)


COLUMNS = ("run", "pre-training", "steps", "score", "by seed", "train s")


def table_row(
  title: str, way: Way, results: Sequence[tuple[int, list[Result]]]
) -> list[str]:
  """Returns the table row of a cell in one way; its last phase is scored.

  Args:
    title: title of the cell.
    way: way in which the cell was run.
    results: for each seed, the results of all phases.
  """
  # Average the scores over the seeds.
  last = [phases[-1] for _, phases in results]
  metric = last[0]["metric"]
  factor = 1 if metric in ("perplexity", "error") else 100
  scores = [factor * float(result[metric]) for result in last]
  mean = f"{statistics.mean(scores):.2f}"
  if len(scores) > 1:
    mean += f" +- {statistics.stdev(scores):.2f}"
  # Add up the steps and the times of all phases.
  steps = " + ".join(
    f"{phase['config']['total_steps']:,}" for phase in results[0][1]
  )
  seconds = statistics.mean(
    sum(phase["train_seconds"] for phase in phases) for _, phases in results
  )
  listed = ", ".join(f"{score:.2f}" for score in scores)
  return [title, way.title, steps, f"{mean} {metric}", listed, f"{seconds:.0f}"]


def format_plan(rows: Sequence[Sequence[str]]) -> str:
  """Returns rows of `table_row` as a table in Markdown."""
  return markdown_table(COLUMNS, rows, right=(5,))
