r"""Runs every combination of a grid, and prints one table of the results.

python launch/sweep.py --config lra/text \
    --config lra/listops --workdir runs/lra --seeds 0,1,2 \
    --grid model=transformer,transject --grid size=tiny

`--grid KEY=VALUE,VALUE` lists values of a config's argument or of any field of
the run: `--grid model.num_layers=1,2,4`, `--grid task.max_len=500,1000`.
`--tune` also lists values. All of them run with the first seed; the value that
is best on the selection split then runs with the other seeds. Arguments that
begin with --config. or --noconfig. are passed to every run. `--set
WHERE:FIELD=VALUE,...` sets fields of some runs: `--set
model=transject:batch_size=16`, `--set config=text:task.archive=PATH`.

After a stop, run the same command again, possibly with more values: runs with
results are not repeated, and the others resume from their checkpoints. Failed
runs and missing data are listed at the end, and all other runs still run. The
exit status is 1 if a run failed, and under `--strict` also if data were
missing.

`--slurm` submits all runs to Slurm at once, as an array, and waits for them.
`--slurm partition=gpu,time=720,gpus_per_node=8` sets parameters of submitit,
which have the names of sbatch's options (times in minutes). A sweep that is
stopped and run again waits for the jobs that are still queued. `--dry_run`
prints the commands, and with `--slurm` also the script of the jobs. It prepares
and runs nothing, and needs no Slurm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.tables import results
from jaxformers.foundations import cli, interrupts
from jaxformers.foundations.errors import UserError
from jaxformers.sweep import arguments, grid
from jaxformers.sweep.runs import Sweep, run_grid


def _parse_arguments(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
  """Splits the arguments into options of the sweep and overrides of runs."""
  pairs = {"metavar": "KEY=VALUE,..."}
  repeated = {"action": "append"}
  parser = cli.parser(
    __name__,
    # Which runs: configs, workdir, axes and seeds.
    cli.argument(
      "--config",
      **repeated,
      required=True,
      help="path.py or path.py:key=value,...; repeatable",
    ),
    cli.argument("--workdir", type=Path, required=True, help="folder of runs"),
    cli.argument(
      "--grid",
      **repeated,
      **pairs,
      help="values of an argument or a field; repeatable",
    ),
    arguments.SETTINGS,
    cli.argument(
      "--tune",
      **pairs,
      help="values to try with the first seed; the best one runs with all",
    ),
    cli.argument("--seeds", default="0", help="such as 0,1,2"),
    arguments.SLURM,
    cli.switch("--dry_run", help="print the commands, run nothing"),
    arguments.STRICT,
  )
  # Arguments that are not listed above are passed to every run.
  parser.prog, parser.allow_abbrev = "python launch/sweep.py", False
  return parser.parse_known_args(argv)


def _sweep(
  args: argparse.Namespace, overrides: list[str]
) -> tuple[Sweep, list[dict[str, Any]]]:
  """Runs the grid; returns the sweep and the results."""
  # Read the axes.
  seeds = cli.numbers("seeds", args.seeds)
  axes = [grid.parse_axis(text) for text in args.grid or ()]
  tuned = grid.parse_axis(args.tune) if args.tune else None
  every = [*axes, tuned] if tuned else axes
  # Check the axes before Slurm is needed.
  arguments.check_overrides(overrides, every)
  grid.expand(args.config, every)
  cells = grid.expand(args.config, axes)
  cells = grid.set_fields(cells, args.settings or ())
  # Start the runs.
  sweep = arguments.make_sweep(args, overrides)
  return sweep, run_grid(sweep, cells, tuned, seeds, args.dry_run)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line; errors of users and files end in one message."""
  args, overrides = _parse_arguments(argv)
  try:
    sweep, finished = _sweep(args, overrides)
  except KeyboardInterrupt:
    interrupts.leave("runs with results are not repeated.")
  except (UserError, OSError) as error:
    sys.exit(f"error: {error}")
  # Print the table of finished runs, then the failed and missing ones.
  if finished:
    print("\n" + results.markdown(results.summarise(finished)))
  arguments.print_outcome(sweep, strict=args.strict)


if __name__ == "__main__":
  main()
