"""Pre-training and fine-tuning within one budget of steps."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers.errors import UserError
from jaxformers.registry import choose
from jaxformers.sweep.grid import Cell, Pairs
from jaxformers.sweep.runs import Sweep
from jaxformers.tables import markdown_table
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
  found = [Way()] * (0 in shares) + list(dict.fromkeys(every))
  if not found:
    raise UserError("There is nothing to run: give --objectives and --shares.")
  return found


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
  if warmup := config["schedule"].get("warmup_steps"):
    part = round(warmup * steps / config["total_steps"])
    fields += (("schedule.warmup_steps", str(part)),)
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
      total = before.load_config(cell, 0)["total_steps"]
      steps = split_budget(total, way.share)
      first = _with(cell, before, steps[0], self.first)
      first = first.extended("objective", way.objective)
      second = _with(cell, after, steps[1], self.second)
      phases[0].append(Phase(before, first))
      phases[1].append(Phase(after, second))
    return phases

  def run(
    self, way: Way, cells: Sequence[Cell], seeds: Sequence[int]
  ) -> list[list[tuple[int, list[Result]]]]:
    """Runs a way; returns for each cell its seeds with results of all phases.

    A seed of which a phase has failed is left out.
    """
    done: dict[tuple[int, int], list[Result]] = {
      (i, seed): [] for i in range(len(cells)) for seed in seeds
    }
    begin: list[Phase] = []
    for phase in self.phases(way, cells):
      sweep = phase[0].sweep
      runs = {
        (i, seed): _begun(phase[i], begin[i : i + 1], seed) for i, seed in done
      }
      for seed in seeds:
        if own := [cell for (_, of), cell in runs.items() if of == seed]:
          sweep.check(own, [seed])
      sweep.submit([(cell, seed) for (_, seed), cell in runs.items()])
      results = {key: sweep.run(cell, key[1]) for key, cell in runs.items()}
      done = {
        key: [*before, results[key]]
        for key, before in done.items()
        if results[key] is not None
      }
      begin = phase
    return [
      [(seed, list(done[i, seed])) for seed in seeds if (i, seed) in done]
      for i in range(len(cells))
    ]

  def commands(
    self, way: Way, cells: Sequence[Cell], seeds: Sequence[int]
  ) -> list[list[str]]:
    """Returns the commands of all runs of a way, in their order."""
    found, begin = [], []
    for phase in self.phases(way, cells):
      sweep = phase[0].sweep
      sweep.check([run.cell for run in phase], seeds, open_data=False)
      found += [
        sweep.command(_begun(run, begin[i : i + 1], seed), seed)
        for i, run in enumerate(phase)
        for seed in seeds
      ]
      begin = phase
    return found


def _begun(phase: Phase, before: Sequence[Phase], seed: int) -> Cell:
  """Returns the cell of a run, which begins with that of the phase before."""
  cell = phase.cell
  begin = tuple(("pretrained", str(run.folder(seed))) for run in before)
  return dataclasses.replace(cell, settings=(*cell.settings, *begin))


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
  kind = f"{way.objective} {way.share:.0%}" if way.share else "none"
  listed = ", ".join(f"{score:.2f}" for score in scores)
  return [title, kind, steps, f"{mean} {metric}", listed, f"{seconds:.0f}"]


def table(rows: Sequence[Sequence[str]]) -> str:
  """Returns rows of `table_row` as a table in Markdown."""
  return markdown_table(COLUMNS, rows, right=(5,))
