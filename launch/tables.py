r"""Reproduces a table or figure of the papers: its runs, then the table.

python launch/tables.py 2 --workdir runs/table_2 --archives PATH
python launch/tables.py 2 --workdir runs/table_2 --archives PATH --dry_run \
    --device v5e:4x4

Tables are 1, 2, 3 (TransJect's), lra, neutreno_1 to neutreno_13, levine_2;
diagnostics, with state tracking and recall of every encoder; and mad, with the
scores of MAD. The list is below.
Every run has the protocol of the table. PATH is a folder with the archives
under their authors' names, and with BERT's vocab.txt for table 1. Missing data
are listed, and the other runs still run. At the end the command prints the
table next to the paper's numbers, or next to what theory says. Table 3 trains
nothing: it counts parameters and times inference on this machine.

After a stop, run the same command again: runs with results are not repeated,
and the others resume. `--slurm`, `--set` and arguments that begin with
--config. work as in launch/sweep.py. `--size tiny` runs a small version of the
table if the configs have such a size, and `--models` runs a part of it.

`--dry_run` prepares nothing. It prints the command of every run, with its steps
and with estimates of hours and memory on the local device. The estimates
combine the operations of the model, the measured rate of a large product and
the share of it that a step usually reaches, so they are right within a factor
of two or so. `--device` also compiles the steps of every run for that device,
which need not be there, and adds the hours by the compiler's count. This takes
a minute or more for each run of a table. See docs/devices.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.tables import diagnostics, published, results, speed
from jaxformers.foundations import cli, interrupts
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table
from jaxformers.sweep import arguments, grid, plans
from jaxformers.sweep.runs import Sweep, candidates, run_grid
from jaxformers.training import topologies

SPEED = "transject_3"
SPEED_TITLE = "TransJect, table 3: parameters and speed of inference"


def _parse_arguments(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
  """Splits the arguments into options of the command and overrides of runs."""
  listed = "\n".join(f"  {n:<12} {p.title}" for n, p in plans.PLANS.items())
  # Which table, which data and which runs.
  parser = cli.parser(
    __name__,
    cli.argument("table", help="1, 2, 3, or a name below"),
    cli.argument("--workdir", type=Path, help="folder of runs (not for 3)"),
    cli.argument("--archives", type=Path, help="folder of archives"),
    cli.argument("--seeds", default="0,1,2", help="such as 0,1,2"),
    cli.argument("--models", default="", help="names: a,b (default: all)"),
    cli.argument("--size", default="paper", help="size of the configs"),
    arguments.SETTINGS,
    arguments.SLURM,
    cli.switch("--dry_run", help="print commands and estimates, run nothing"),
    cli.option(
      "device", "", "with --dry_run: hours on v5e:4x4, h100:8, ..., too"
    ),
    arguments.STRICT,
  )
  # Arguments that are not listed above are passed to every run.
  parser.prog, parser.allow_abbrev = "python launch/tables.py", False
  parser.epilog = f"tables:\n  {SPEED:<12} {SPEED_TITLE}\n{listed}"
  return parser.parse_known_args(argv)


def _print_estimates(
  sweep: Sweep,
  cells: Sequence[grid.Cell],
  seeds: Sequence[int],
  device: str,
) -> None:
  """Prints the cost of a run of each cell, and of all runs together.

  Args:
    sweep: runs of the table.
    cells: cells of the table.
    seeds: seeds of every cell.
    device: name of another device to give hours for, or "".
  """
  from jaxformers.sweep import estimates  # Starts the device.

  if device:
    topologies.read_name(device)  # Check the name.
  # Estimate one seed of each cell.
  rate = estimates.measure_rate()
  configs = [sweep.load_config(cell, seeds[0]) for cell in cells]
  data = [plans.DATA[Path(cell.path).stem] for cell in cells]
  costs = estimates.estimate_all(configs, data, rate)
  # Write a line for each cell.
  lines = [
    [
      cell.title,
      f"{cost.steps:,}",
      f"{cost.hours:,.1f}",
      f"{cost.gigabytes:.1f}",
      _describe_data(cell, facts),
    ]
    for cell, cost, facts in zip(cells, costs, data, strict=True)
  ]
  header = ["run", "steps", "hours", "GB", "data"]
  # Add a column with the hours on the device.
  there: list[float] = []
  if device:
    for line, config, facts in zip(lines, configs, data, strict=True):
      there.append(estimates.compiled_hours(config, facts, device))
      line.insert(3, f"{there[-1]:,.2f}")
    header.insert(3, f"hours, {device}")
  # Print the table, and the hours of all runs.
  right = range(1, len(header) - 1)
  print("\n" + markdown_table(header, lines, right=tuple(right)))
  total = len(seeds) * sum(cost.hours for cost in costs)
  print(
    f"\n{len(cells) * len(seeds)} runs with {len(seeds)} seeds: about "
    f"{total:,.0f} hours one after the other, with products at "
    f"{rate / 1e9:,.0f} GFLOP/s. Estimated, not measured."
  )
  if device:
    print(
      f"On {device} about {len(seeds) * sum(there):,.1f} hours, by the "
      "compiled steps: not measured."
    )


def _describe_data(cell: grid.Cell, facts: plans.Data) -> str:
  """Returns the archive of a cell, or the reason why it has none."""
  if archive := dict(cell.settings).get("task.archive"):
    return Path(archive).name
  return "generated" if facts.is_generated else "not in --archives"


def _print_speed(*, dry_run: bool) -> None:
  """Prints table 3; only its title if `dry_run`."""
  print(f"{SPEED_TITLE}\n")
  if not dry_run:
    print(speed.text(speed.measure_seconds()))


def _run(args: Any, overrides: list[str]) -> Sweep:
  """Runs a plan, and prints its estimates or its results."""
  # Find the plan, and check the options.
  plan = plans.find_plan(args.table)
  if args.workdir is None:
    raise UserError("The runs need a folder: give --workdir.")
  if args.device and not args.dry_run:
    raise UserError(
      f"--device={args.device} is for estimates: add --dry_run, or remove "
      "--device."
    )
  # Make the cells, and run them or print their commands.
  models = cli.names(args.models)
  cells = plans.make_cells(plan, args.archives, size=args.size, models=models)
  cells = grid.set_fields(cells, args.settings or ())
  seeds = cli.numbers("seeds", args.seeds)
  sweep = arguments.make_sweep(args, overrides)
  print(f"{plan.title}. {plan.note}".rstrip(), flush=True)
  finished = run_grid(sweep, cells, plan.tuned, seeds, args.dry_run)
  if args.dry_run:
    # The value for the other seeds is known only after tuning.
    once = seeds[:1] if plan.tuned else seeds
    tuned = candidates(cells, plan.tuned)
    _print_estimates(sweep, tuned, once, args.device)
  # Print the table of our runs, then the same table next to the paper's.
  if finished:
    print("\n" + results.markdown(results.summarise(finished)) + "\n")
    print(published.text(published.tables(finished)))
    for table in (diagnostics.matrix, diagnostics.mad_scores):
      if text := table(finished):
        print(text)
  return sweep


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line; errors of users and files end in one message."""
  args, overrides = _parse_arguments(argv)
  try:
    arguments.check_overrides(overrides, ())
    if args.table in ("3", SPEED):
      _print_speed(dry_run=args.dry_run)
      return
    sweep = _run(args, overrides)
  except KeyboardInterrupt:
    interrupts.leave("runs with results are not repeated.")
  except (UserError, OSError) as error:
    sys.exit(f"error: {error}")
  arguments.print_outcome(sweep, strict=args.strict)


if __name__ == "__main__":
  main()
