r"""Pre-trains on a task's own inputs, fine-tunes, and compares with scratch.

python launch/pretrain.py --config lra/text:size=tiny \
    --grid model=transformer,s5 --workdir runs/pretrain --seeds 0,1,2

Every way has the steps of its config, `config.total_steps`. A share of them is
spent on pre-training, and the rest on fine-tuning. `--shares 0,0.5` compares
training from scratch with half of the steps for each. `--objectives
masked,causal` also predicts the next token, for mixers with a causal form.
Batches and models are the same in both phases. `--pretraining FIELD=VALUE,...`
and `--tuning FIELD=VALUE,...` set fields of one phase, and arguments that begin
with --config. are passed to every run. `--out FOLDER` draws the scores that
chose the checkpoints, over the steps of both phases.

After a stop, run the same command again: runs with results are not repeated,
and the others resume in the phase where they stopped. `--slurm` and `--set` are
the same as in launch/sweep.py.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Texts
from jaxformers.analysis.tables import runs
from jaxformers.foundations import cli, interrupts, requirements
from jaxformers.foundations.errors import UserError
from jaxformers.sweep import arguments, grid, pretraining
from jaxformers.sweep.pretraining import Phase, Pretraining, Way
from jaxformers.sweep.runs import Sweep


def _parse_arguments(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
  """Splits the arguments into options of the command and overrides of runs."""
  pairs = {"metavar": "FIELD=VALUE,...", "default": ""}
  # Which runs: configs, workdir, axes, ways and fields of each phase.
  parser = cli.parser(
    __name__,
    cli.argument(
      "--config",
      action="append",
      required=True,
      help="path.py or path.py:key=value,...; repeatable",
    ),
    cli.argument("--workdir", type=Path, required=True, help="folder of runs"),
    cli.argument(
      "--grid",
      action="append",
      metavar="KEY=VALUE,...",
      help="values of an argument or a field; repeatable",
    ),
    cli.argument("--objectives", default="masked", help="masked, causal"),
    cli.argument(
      "--shares", default="0,0.5", help="shares of steps for pre-training"
    ),
    cli.argument("--pretraining", **pairs, help="fields of pre-training"),
    cli.argument("--tuning", **pairs, help="fields of fine-tuning"),
    cli.argument("--out", type=Path, help="folder of pretraining.png and .csv"),
    arguments.SETTINGS,
    cli.argument("--seeds", default="0", help="such as 0,1,2"),
    arguments.SLURM,
    cli.switch("--dry_run", help="print the commands, run nothing"),
  )
  # Arguments that are not listed above are passed to every run.
  parser.prog, parser.allow_abbrev = "python launch/pretrain.py", False
  return parser.parse_known_args(argv)


def _fields(flag: str, text: str) -> grid.Pairs:
  """Returns the fields of a phase from `text`, the value of its flag."""
  if not text:
    return ()
  # Split the pairs, and refuse other forms.
  pairs = [item.partition("=") for item in text.split(",")]
  for key, equals, value in pairs:
    if not (equals and value and grid.is_field(key)):
      raise UserError(
        f"--{flag}={text}: write FIELD=VALUE,..., such as "
        "schedule.learning_rate=1e-3."
      )
  return tuple((key, value) for key, _, value in pairs)


def _run(args: argparse.Namespace, overrides: list[str]) -> list[Sweep]:
  """Runs all ways and prints their table; returns the sweeps of the runs."""
  # Read the seeds, the cells and the ways.
  seeds = cli.numbers("seeds", args.seeds)
  axes = [grid.parse_axis(text) for text in args.grid or ()]
  arguments.check_overrides(overrides, axes)
  cells = grid.set_fields(grid.expand(args.config, axes), args.settings or ())
  shares = cli.numbers("shares", args.shares, float)
  chosen = pretraining.ways(cli.names(args.objectives), shares)

  def make_sweep(folder: Path) -> Sweep:
    namespace = argparse.Namespace(**{**vars(args), "workdir": folder})
    return arguments.make_sweep(namespace, overrides)

  # Find the fields of each phase.
  phases = (
    _fields(name, getattr(args, name)) for name in ("pretraining", "tuning")
  )
  all_runs = Pretraining(make_sweep, args.workdir, *phases)
  # Fail early if plots cannot be drawn.
  if args.out:
    requirements.require("plots", f"--out={args.out}")
  # Print the commands, or check every run before the first one starts.
  if args.dry_run:
    for way in chosen:
      for command in all_runs.commands(way, cells, seeds):
        print(shlex.join(command))
    return []
  all_runs.check(chosen, cells, seeds)
  # Run every way, and collect a row for each cell.
  rows, points = [], []
  for way in chosen:
    by_cell = all_runs.run(way, cells, seeds)
    rows += [
      pretraining.table_row(cell.title, way, results)
      for cell, results in zip(cells, by_cell, strict=True)
      if results
    ]
    # Collect the curves of the last phase.
    if args.out:
      last = all_runs.phases(way, cells)[-1]
      for phase, cell, results in zip(last, cells, by_cell, strict=True):
        points += _points(way, cell.title, phase, results)
  # Print the table, and draw the curves.
  if rows:
    print("\n" + pretraining.format_plan(rows))
  if args.out:
    _draw(points, args.out)
  return all_runs.sweeps


def _points(
  way: Way,
  title: str,
  last: Phase,
  results: Sequence[tuple[int, Sequence[Mapping[str, Any]]]],
) -> Iterator[tuple[str, int, str, int, float]]:
  """Yields the scores that chose the checkpoints, as `plots.curves` takes them.

  The steps of the last phase are counted after the steps of pre-training.

  Args:
    way: way of the runs.
    title: title of the cell, which has a panel.
    last: last phase of the cell.
    results: for each seed, the results of all phases.
  """
  for seed, phases in results:
    # Shift the steps by the steps of the earlier phases.
    before = sum(phase["config"]["total_steps"] for phase in phases[:-1])
    metric = phases[-1]["metric"]
    (record,), _ = runs.discover([last.folder(seed)])
    # Keep the metric on the split that selects the checkpoint.
    for line in record.metrics:
      for key, value in line.items():
        split, _, name = key.partition("/")
        if name == metric and split != "train":
          yield way.title, seed, title, before + line["step"], value


def _draw(points: Sequence[Any], out: Path) -> None:
  """Draws scores over steps into a folder, with one panel per cell."""
  panels = {row[2]: row[2] for row in points}
  caption = (
    "Scores on the selection split over the steps of both phases. A curve that "
    "begins late has spent the earlier steps on pre-training."
  )
  texts = Texts("pretraining", "Pre-training and fine-tuning", caption)
  figure = plots.curves(texts, points, "step", panels, markers=False)
  paths = figure.write(out)
  print(f"Written to {', '.join(map(str, paths))}.")


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line; errors of users and files end in one message."""
  args, overrides = _parse_arguments(argv)
  try:
    sweeps = _run(args, overrides)
  except KeyboardInterrupt:
    interrupts.leave("runs with results are not repeated.")
  except (UserError, OSError) as error:
    sys.exit(f"error: {error}")
  arguments.print_outcome(*sweeps, strict=False)


if __name__ == "__main__":
  main()
