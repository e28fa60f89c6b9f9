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
from jaxformers.sweep.runs import Sweep
from jaxformers.tasks.reconstruction import OBJECTIVES

Result = Mapping[str, Any]
MakeSweep = Callable[[Path], Sweep]  # Takes the folder of the runs.


class Way(NamedTuple):
  """How much of a budget is spent on what.

  Attributes:
    objective: "masked" or "causal"; "" for training from scratch.
    share: share of the steps that are spent on pre-training.
  """

  objective: str = ""
  share: float = 0.0

  @property
  def title(self) -> str:
    """Name for people, such as "masked 50%", or "none"."""
    return f"{self.objective} {self.share:.0%}" if self.share else "none"

  @property
  def folder(self) -> Path:
    """Folder of its runs, such as masked_0.5."""
    return Path(f"{self.objective}_{self.share:g}" if self.share else "scratch")


def ways(objectives: Sequence[str], shares: Sequence[float]) -> list[Way]:
  """Returns every objective with every share; training from scratch once.

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
  """The runs of a phase: what starts them, and their cell.

  Attributes:
    sweep: starts the runs.
    cell: cell of the runs of all seeds.
  """

  sweep: Sweep
  cell: Cell

  def folder(self, seed: int) -> Path:
    """Returns the workdir of a run."""
    return self.sweep.folder(self.cell, seed)


def split_budget(total: int, share: float) -> tuple[int, int]:
  """Returns the steps of pre-training and of fine-tuning, at least one each.

  Raises:
    UserError: for a budget of less than two steps.
  """
  if total < 2:
    raise UserError(
      f"config.total_steps={total} cannot be divided: give at least 2."
    )
  before = min(max(round(total * share), 1), total - 1)
  return before, total - before


def _with(cell: Cell, sweep: Sweep, steps: int, *settings: Pairs) -> Cell:
  """Returns a cell of fewer steps, with as much less warm-up."""
  config = sweep.load_config(cell, 0)
  fields: Pairs = (("total_steps", str(steps)),)
  schedule = config.schedule
  if warmup := schedule.warmup_steps:
    part = max(round(warmup * steps / config.total_steps), 1)
    fields += (("schedule.warmup_steps", str(part)),)
    if schedule.name == "rsqrt":
      # Its peak is the rate over the root of the warm-up: keep the peak.
      rate = schedule.options["learning_rate"] * (part / warmup) ** 0.5
      fields += (("schedule.learning_rate", f"{rate:.6g}"),)
  more = tuple(pair for pairs in settings for pair in pairs)
  return dataclasses.replace(cell, settings=(*cell.settings, *fields, *more))


@dataclasses.dataclass
class Pretraining:
  """Runs cells in several ways, every way within the steps of its config.

  Attributes:
    make_sweep: makes what starts the runs in a folder.
    workdir: folder of all runs.
    first, second: fields of pre-training alone, and of fine-tuning alone.
    sweeps: those that were made, for their failures.
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
    """Returns the phases of a way, and in each the runs of every cell."""
    if not way.share:
      sweep = self._sweep(way.folder)
      return [[Phase(sweep, cell) for cell in cells]]
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
    """Checks all runs of several ways before the first one is started.

    Raises:
      UserError: for a run that could not start, or a model whose pre-trained
        encoder its fine-tuning could not take over.
    """
    for way in chosen:
      phases = self.phases(way, cells)
      for sweep, begun in _begin_all(phases, seeds):
        for seed in seeds:
          sweep.check([cell for cell, of in begun if of == seed], [seed])
      for runs in zip(*phases, strict=True):
        _check_transfer(runs)

  def run(
    self, way: Way, cells: Sequence[Cell], seeds: Sequence[int]
  ) -> list[list[tuple[int, list[Result]]]]:
    """Runs a way; returns for each cell its seeds with results of all phases.

    A seed of which a phase has failed is left out.
    """
    keys = [(i, seed) for i in range(len(cells)) for seed in seeds]
    done: dict[tuple[int, int], list[Result]] = {key: [] for key in keys}
    for sweep, begun in _begin_all(self.phases(way, cells), seeds):
      # Leave out what has failed in an earlier phase.
      runs = {k: b for k, b in zip(keys, begun, strict=True) if k in done}
      sweep.submit([*runs.values()])
      results = {key: sweep.run(*pair) for key, pair in runs.items()}
      done = {
        key: [*before, result]
        for key, before in done.items()
        if (result := results[key]) is not None
      }
    return [
      [(seed, done[i, seed]) for seed in seeds if (i, seed) in done]
      for i in range(len(cells))
    ]

  def commands(
    self, way: Way, cells: Sequence[Cell], seeds: Sequence[int]
  ) -> list[list[str]]:
    """Returns the commands of all runs of a way, in their order."""
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
  """Yields what starts the runs of each phase, and their cells and seeds.

  A run begins with that of the phase before of its own cell and seed.
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
  """Raises UserError if a run cannot take over the encoder of the one before.

  Args:
    phases: successive phases of a cell.
  """
  opened = []
  for sweep, cell in phases:
    config = sweep.load_config(cell, 0)
    task = sweep.open_task(config)
    model = models.build(**vars(config.model), **task.sizes())
    # Shapes alone matter, and zeros take no memory until they are read.
    params = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype), models.shapes(model)
    )
    opened.append((task, params))
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
  """Returns the cell of a run, which begins with that of the phase before."""
  if before is None:
    return phase.cell
  begin = (("pretrained", str(before.folder(seed))),)
  settings = (*phase.cell.settings, *begin)
  return dataclasses.replace(phase.cell, settings=settings)


COLUMNS = ("run", "pre-training", "steps", "score", "by seed", "train s")


def table_row(
  title: str, way: Way, results: Sequence[tuple[int, list[Result]]]
) -> list[str]:
  """Returns the row of a cell in one way: scores are of its last phase.

  Args:
    title: cell, for people.
    way: way of its runs.
    results: seeds, with the results of all phases.
  """
  last = [phases[-1] for _, phases in results]
  metric = last[0]["metric"]
  factor = 1 if metric in ("perplexity", "error") else 100
  scores = [factor * float(result[metric]) for result in last]
  mean = f"{statistics.mean(scores):.2f}"
  if len(scores) > 1:
    mean += f" +- {statistics.stdev(scores):.2f}"
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
