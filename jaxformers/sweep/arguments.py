"""Arguments that the launchers of sweeps and tables share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jaxformers import config as configs
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.sweep.grid import Axis
from jaxformers.sweep.runs import Sweep
from jaxformers.sweep.slurm import SlurmSweep, parse_parameters

SETTINGS = cli.argument(
  "--set",
  action="append",
  dest="settings",
  metavar="WHERE:FIELD=VALUE,...",
  help="set fields of some runs; repeatable",
)
# `--slurm` without a value is ""; None stands for runs on this machine.
SLURM = cli.argument(
  "--slurm",
  metavar="KEY=VALUE,...",
  nargs="?",
  const="",
  help="submit the runs to Slurm, with parameters of the jobs",
)
STRICT = cli.switch("--strict", help="end with status 1 if data are missing")


def check_overrides(overrides: Sequence[str], axes: Sequence[Axis]) -> None:
  """Raises UserError for an argument that cannot be passed to every run.

  Args:
    overrides: arguments that the command itself does not know.
    axes: axes of the grid; no override may set their fields.
  """
  for argument in overrides:
    if not cli.is_override(argument):
      raise UserError(
        f"{argument!r} is not an option of a sweep: --help lists them. Set "
        "fields of runs by --config.FIELD=VALUE."
      )
    (field,) = configs.values_of([argument])
    # One seed for all runs would repeat the same run.
    if field == "seed":
      raise UserError(f"{argument}: give --seeds, such as --seeds 0,1,2.")
    # An override would undo the values of an axis.
    if field in (key for key, _ in axes):
      raise UserError(f"{argument}: {field} is an axis, too: remove one.")


def make_sweep(args: Any, overrides: Sequence[str]) -> Sweep:
  """Returns a sweep: local runs one at a time, or all at once on Slurm.

  Args:
    args: parsed arguments, with `workdir`, `slurm` and `dry_run`.
    overrides: arguments that are passed to every run.
  """
  if args.slurm is None:
    return Sweep(args.workdir, overrides)
  return SlurmSweep(
    args.workdir,
    overrides,
    parse_parameters(args.slurm),
    dry_run=args.dry_run,
  )


def print_outcome(*sweeps: Sweep, strict: bool) -> None:
  """Prints missing data and failed runs; exits with status 1 for failures.

  Args:
    *sweeps: sweeps that have ended.
    strict: True to exit with status 1 for missing data as well.
  """
  missing, failed = (
    [f"{k}: {v}" for sweep in sweeps for k, v in getattr(sweep, name).items()]
    for name in ("missing", "failed")
  )
  # Missing data are an error only if `strict` is set.
  if missing:
    listed = "\n  ".join(dict.fromkeys(missing))
    print(f"\nNot run, since data are missing:\n  {listed}", file=sys.stderr)
  if failed:
    listed = "\n  ".join(failed)
    sys.exit(f"error: runs that failed, with their exit status:\n  {listed}")
  if missing and strict:
    sys.exit(1)
