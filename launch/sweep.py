r"""Runs every combination of a grid, and makes one table.

python launch/sweep.py --config configs/lra/text.py \
    --config configs/lra/listops.py --workdir runs/lra --seeds 0,1,2 \
    --grid model=transformer,transject --grid size=tiny

`--grid KEY=VALUE,VALUE` names values of a config's argument. `--tune` does so
too, but of those values the one with the best score on the selection split,
under the first seed, is run with the other seeds. What begins with --config. or
--noconfig. goes to every run.

Run it again after a stop, or with more values: what has results is not run
again, and what has not goes on from its checkpoint. A run that fails is named
at the end, and the others are run all the same.

`--slurm` hands the runs to Slurm, all at once as an array, and waits for them;
`--slurm partition=gpu,time=720,gpus_per_node=8` sets what submitit takes, which
is what sbatch does (times in minutes). Stopped and run again, it waits for the
jobs that are still there. `--dry_run` prints the commands and runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from jaxformers import config as configs
from jaxformers import durable, interrupts, models, tasks
from jaxformers.analysis.tables import results
from jaxformers.errors import UserError
from jaxformers.training import resume
from jaxformers.training.run import check_fields

Axis = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination of the grid.

  Attributes:
    path: of the config.
    arguments: (key, value) of the config, in the order of the grid.
  """

  path: str
  arguments: tuple[tuple[str, str], ...] = ()

  def and_(self, key: str, value: str) -> Cell:
    """The same with one argument more."""
    return Cell(self.path, (*self.arguments, (key, value)))

  @property
  def spec(self) -> str:
    """As `--config` takes it."""
    given = ",".join(f"{key}={value}" for key, value in self.arguments)
    return f"{self.path}:{given}" if given else self.path

  @property
  def folder(self) -> Path:
    """Of its runs, in the workdir: lra_text/model=transject,size=tiny."""
    path = Path(self.path)
    own = "_".join(part for part in (path.parent.name, path.stem) if part)
    given = ",".join(f"{key}={value}" for key, value in self.arguments)
    return Path(own, given) if given else Path(own)


def axis(text: str) -> Axis:
  """ "KEY=VALUE,VALUE" as (KEY, its values); ValueError for anything else."""
  key, equals, values = text.partition("=")
  found = tuple(value.strip() for value in values.split(","))
  if not key.strip() or not equals or not all(found):
    raise UserError(f"{text!r} is no axis of a grid: write KEY=VALUE,VALUE.")
  if len({*found}) < len(found):
    raise UserError(f"{text!r} names a value twice.")
  return key.strip(), found


def cells(paths: Sequence[str], grid: Sequence[Axis]) -> list[Cell]:
  """All combinations, the last axis changing fastest.

  Args:
    paths: path.py or path.py:key=value,...
    grid: of `axis`.

  Raises:
    UserError: for an axis that stands there twice.
  """
  keys = [key for key, _ in grid]
  for key in keys:
    if keys.count(key) > 1:
      raise UserError(f"{key} is an axis twice: write its values in one.")
  if "seed" in keys:
    raise UserError("seed is no axis: give --seeds, so that they are averaged.")
  values = [[(key, value) for value in found] for key, found in grid]
  found = []
  for spec in paths:
    path, _, given = spec.partition(":")
    fixed = [axis(item) for item in given.split(",") if item]
    own = tuple((key, value) for key, (value,) in fixed)
    for key, _ in own:
      if [*keys, *(name for name, _ in own)].count(key) > 1:
        raise UserError(f"{key} stands in {spec} and in the grid, or twice.")
      if key == "seed":
        raise UserError(f"{spec}: give --seeds, such as --seeds 0,1,2.")
    found += [Cell(path, own + some) for some in itertools.product(*values)]
  return found


Pair = tuple[Cell, int]  # With its seed.
MAIN = (sys.executable, "-m", "jaxformers.main")
REQUEUES = 20  # Of a job whose time is up before its run has ended.
TO_SAVE = 100  # Seconds that a run has then.


def slurm_parameters(text: str) -> dict[str, int | str]:
  """ "KEY=VALUE,KEY=VALUE" as a dict, numbers as such; ValueError otherwise."""
  found: dict[str, int | str] = {}
  for item in text.split(",") if text else ():
    key, equals, value = item.partition("=")
    if not key or not equals or not value:
      raise UserError(f"--slurm {text}: {item!r} is not KEY=VALUE.")
    if not value.isprintable():  # A line of its own in the script of the job.
      raise UserError(f"--slurm {key}={value!r}: give a printable value.")
    is_number = value.isascii() and value.isdigit()
    found[key] = int(value) if is_number else value
  return found


class Sweep:
  """The runs of a grid in a workdir, one at a time.

  Attributes:
    workdir: of all runs.
    overrides: arguments that go to every run.
    failed: what did not end in results, with the exit status.
  """

  def __init__(self, workdir: Path, overrides: Sequence[str]) -> None:
    self.workdir = workdir
    self.overrides = list(overrides)
    self.failed: dict[str, int | str] = {}
    self._opened: dict[str, Any] = {}

  def config(self, cell: Cell, seed: int) -> dict[str, Any]:
    """The config of a run as `jaxformers.main` reads it.

    Raises:
      UserError: for an argument or a field that the config has not.
    """
    loaded = configs.load(cell.spec)
    rest, options = configs.take_options(loaded, self.overrides)
    configs.check_overrides(loaded, rest)
    own = flags.FlagValues()
    argv = ["sweep", *rest]
    with _argv(argv):  # Where ml_collections looks for overrides.
      try:
        config_flags.DEFINE_config_dict("config", loaded, flag_values=own)
        own(argv)
      except (flags.Error, TypeError, KeyError) as error:
        raise UserError(str(error)) from None
    found = own.config
    configs.set_options(found, options)
    found.seed = seed
    return configs.complete(found)

  def description(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """What numbers depend on of the task that a config names.

    Opens it, and prepares its data if they are not yet.

    Raises:
      UserError: for data that cannot be had.
    """
    options = dict(config["task"], data_dir=config["data_dir"])
    key = json.dumps(options, sort_keys=True, default=str)
    if key not in self._opened:
      found = tasks.get(**options).description()
      self._opened[key] = json.loads(json.dumps(found))
    return self._opened[key]

  def done(self, cell: Cell, seed: int) -> dict[str, Any] | None:
    """The results of a run, or None if it has none.

    Raises:
      UserError: if they are there under another config, or of other data.
    """
    folder, config = self.folder(cell, seed), self.config(cell, seed)
    if not (folder / "results.json").exists():
      return None  # Nor has any data to be prepared.
    return resume.finished_results(folder, config, self.description(config))

  def check(self, grid: Sequence[Cell], seeds: Sequence[int]) -> None:
    """Raises UserError for what a run would not begin with, or run twice."""
    if len({*seeds}) < len(seeds) or min(seeds) < 0:
      raise UserError(
        f"seeds {', '.join(map(str, seeds))}: they differ and are not negative."
      )
    seen: dict[str, Cell] = {}
    cell_configs = [self.config(cell, seeds[0]) for cell in grid]
    for config in cell_configs:  # All of them before any data are prepared.
      check_fields(config)
      for section in ("model", "reference"):
        models.check_names(config[section], f"config.{section}")
    for cell, config in zip(grid, cell_configs, strict=True):
      for same in (json.dumps(config, sort_keys=True), str(cell.folder)):
        if same in seen:
          raise UserError(
            f"{seen[same].spec} and {cell.spec} are one run: name every run "
            "once, and leave to the grid what --config.FIELD=VALUE would fix."
          )
        seen[same] = cell
      self.description(config)
      for seed in seeds:
        self.done(cell, seed)

  def run(self, cell: Cell, seed: int) -> dict[str, Any] | None:
    """Trains and scores, unless that was done; None if it fails."""
    found = self.done(cell, seed)
    if found is not None:
      return found
    status = self.train(cell, seed)
    found = self.done(cell, seed)
    if found is None:
      self.failed[str(self.folder(cell, seed))] = status
    return found

  def train(self, cell: Cell, seed: int) -> int | str:
    """Trains and scores; the exit status, or why there is none."""
    folder = self.folder(cell, seed)
    print(f"\n== {cell.spec} seed {seed} -> {folder}", flush=True)
    return _call(self.command(cell, seed))

  def together(self, pairs: Sequence[Pair]) -> None:
    """Told what is run next, for a sweep that can at once."""

  def command(self, cell: Cell, seed: int) -> list[str]:
    """What a run is."""
    return [
      *MAIN,
      *("--config", cell.spec, f"--workdir={self.folder(cell, seed)}"),
      *(f"--config.seed={seed}", *self.overrides),
    ]

  def tune(self, cell: Cell, tuned: Axis, seed: int) -> Cell | None:
    """The cell with the best of the axis' values; None if all fail."""
    key, values = tuned
    scores: dict[str, float] = {}  # More is better: of a loss, less than 0.
    before = dict(self.failed)
    select = ""
    for value in values:
      found = self.run(cell.and_(key, value), seed)
      if found is not None:
        scores[value] = found["selection_score"]
        select = found["config"]["select"]
    if not scores:
      return None
    # A value that diverges is a finding, and no failure.
    lost, self.failed = self.failed.keys() - before.keys(), before
    best = max(scores, key=scores.__getitem__)
    listed = ", ".join(f"{value}: {abs(x):.4f}" for value, x in scores.items())
    print(f"\n== {cell.spec}: {key}={best}, by {select}: {listed}", flush=True)
    for folder in sorted(lost):
      print(f"   Without results, and left out: {folder}")
    ends = _ends(values)
    if best in ends:
      print(f"   It is at the end of what was tried: try more of {key}.")
    return cell.and_(key, best)

  def folder(self, cell: Cell, seed: int) -> Path:
    """The workdir of a run."""
    return self.workdir / cell.folder / f"seed_{seed}"


class Task:
  """A run as a job of submitit: what is called there, and ended in time."""

  def __init__(self, command: Sequence[str]) -> None:
    self.command = list(command)

  def __call__(self) -> int:
    """Runs the command to its end; its exit status."""
    env = dict(os.environ)
    # One task of a node has all of its devices.
    count = env.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
      env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(int(count))))
    # What tells submitit that the time is up may go to the whole group.
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    self._process = subprocess.Popen(self.command, env=env)
    signal.signal(signal.SIGUSR2, before)
    return self._process.wait()

  def checkpoint(self) -> Any:
    """Lets it save, when the job's time is up; the job that goes on."""
    import submitit

    self._process.terminate()
    # `wait` is what was interrupted, and cannot be called in itself.
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
    until = time.monotonic() + TO_SAVE
    while os.waitid(os.P_PID, self._process.pid, ended) is None:
      if time.monotonic() > until:
        break  # The checkpoint before is whole.
      time.sleep(0.1)
    return submitit.helpers.DelayedSubmission(Task(self.command))


class SlurmSweep(Sweep):
  """The same, all at once as jobs of Slurm."""

  def __init__(
    self,
    workdir: Path,
    overrides: Sequence[str],
    parameters: Mapping[str, int | str],
  ) -> None:
    """As `Sweep`, with the parameters of the jobs as submitit takes them.

    Raises:
      UserError: for parameters that there are not, or without Slurm.
    """
    super().__init__(workdir.absolute(), overrides)
    for name in ("nodes", "time"):
      if not isinstance(parameters.get(name, 1), int):
        raise UserError(
          f"--slurm {name}={parameters[name]}: give a number"
          + (" of minutes." if name == "time" else ".")
        )
    if parameters.get("ntasks_per_node", 1) != 1:
      raise UserError(
        f"--slurm ntasks_per_node={parameters['ntasks_per_node']}: a run is "
        "one process a node, which has all of its devices."
      )
    try:
      import submitit
    except ImportError:
      raise UserError(
        "--slurm needs submitit: run pip install 'jaxformers[slurm]'."
      ) from None
    folder = self.workdir / "slurm"
    try:
      self._executor = submitit.SlurmExecutor(
        folder / "%j", max_num_timeout=REQUEUES
      )
      self._executor.update_parameters(
        **{"job_name": "jaxformers", "time": 24 * 60, "ntasks_per_node": 1}
        | {"setup": ["export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"]}
        | parameters,
        signal_delay_s=TO_SAVE + 20,
      )
    except (RuntimeError, ValueError) as error:
      raise UserError(f"--slurm: {error}") from None
    self._nodes = int(parameters.get("nodes", 1))
    self._known = folder / "jobs.json"  # Of every workdir.
    self._jobs: dict[str, Any] = {}

  def command(self, cell: Cell, seed: int) -> list[str]:
    """What a run is; on several nodes its processes find each other."""
    several = ["--distributed"] if self._nodes > 1 else []
    return [*super().command(cell, seed), *several]

  def together(self, pairs: Sequence[Pair]) -> None:
    """Submits what has no results and is not queued yet."""
    known = {}
    if self._known.exists():
      known = json.loads(self._known.read_text(encoding="utf-8"))
    new: dict[str, Task] = {}
    before = 0
    for cell, seed in pairs:
      folder = str(self.folder(cell, seed))
      if folder in self._jobs or self.done(cell, seed) is not None:
        continue
      if folder in known:
        job = self._executor.job_class(
          self._executor.folder, known[folder], list(range(self._nodes))
        )
        if not job.done(force_check=True) and _is_queued(job.job_id):
          self._jobs[folder] = job
          before += 1
          continue
      new[folder] = Task(self.command(cell, seed))
    jobs: dict[str, Any] = {}
    if new:
      with self._executor.batch():
        jobs = {
          folder: self._executor.submit(task) for folder, task in new.items()
        }
      known |= {folder: job.job_id for folder, job in jobs.items()}
      durable.write_json(self._known, known)
    self._jobs |= jobs
    if before or jobs:
      print(
        f"{len(jobs)} jobs submitted, {before} were before; their logs are in "
        f"{self._known.parent}. A sweep that is stopped leaves them alone.",
        flush=True,
      )

  def train(self, cell: Cell, seed: int) -> int | str:
    """Waits for the job of a run."""
    job = self._jobs[str(self.folder(cell, seed))]
    try:
      status = next(filter(None, job.results()), 0)
      for _ in range(60):  # Until a shared file system shows what it wrote.
        if status or self.done(cell, seed) is not None:
          return status
        time.sleep(1)
      return f"job {job.job_id} ended with 0 and left no results"
    except Exception as error:  # Of any kind, from there.
      last = str(error).strip().splitlines()[-1:]
      return f"job {job.job_id} {job.state}: {''.join(last)}"


def _is_queued(job_id: str) -> bool:
  """Whether Slurm knows a job that has left no result; True if nobody says."""
  try:
    done = subprocess.run(
      ["squeue", "--noheader", "--jobs", job_id],
      capture_output=True,
      check=False,
    )
  except OSError:
    return True
  return bool(done.stdout.strip())


def _ends(values: Sequence[str]) -> tuple[str, ...]:
  """The least and the greatest of several numbers; () for other values."""
  try:
    ordered = sorted(values, key=float)
  except ValueError:
    return ()
  return (ordered[0], ordered[-1]) if len(ordered) > 1 else ()


@contextlib.contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
  before, sys.argv = sys.argv, argv
  try:
    yield
  finally:
    sys.argv = before


# Becomes the command, which gets SIGTERM even if the sweep ends by SIGKILL.
# A terminal that closes tells the sweep alone, so that the run can save.
_START = """
import ctypes, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if sys.platform == "linux":
  ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.argv[2], sys.argv[2:])
"""


def _call(command: list[str]) -> int:
  """Runs a command; SIGTERM or SIGHUP to the sweep ends both."""
  asked = False
  start = [sys.executable, "-S", "-c", _START, str(os.getpid())]
  with subprocess.Popen([*start, *command]) as process:

    def stop(*_: object) -> None:
      nonlocal asked
      asked = True
      process.terminate()

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Under nohup it is.
      numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
      status = process.wait()
    except KeyboardInterrupt:  # The run had it, too.
      process.wait()
      sys.exit(130)
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
  if asked or status == 143:  # Whatever the run made of it.
    sys.exit(143)
  if status == 2:
    sys.exit(2)  # Said already, and every other run would say the same.
  return status


def run(
  sweep: Sweep,
  grid: Sequence[Cell],
  tuned: Axis | None,
  seeds: Sequence[int],
  dry_run: bool = False,
) -> list[dict[str, Any]]:
  """All runs of a grid.

  Args:
    sweep: what runs them.
    grid: of `cells`.
    tuned: the axis that is tuned, or None.
    seeds: the first of which tunes.
    dry_run: print the commands of what has no results, and run nothing; of what
      is tuned the first stage alone.

  Returns:
    The results, of the chosen values alone.

  Raises:
    UserError: before the first run, see `Sweep.check`.
  """
  every = list(grid)
  if tuned:
    key, values = tuned
    every = [cell.and_(key, value) for cell in grid for value in values]
  sweep.check(every, seeds)
  if dry_run:
    for cell in every:
      for seed in seeds[:1] if tuned else seeds:
        if sweep.done(cell, seed) is None:
          print(shlex.join(sweep.command(cell, seed)))
    return []
  if tuned:
    sweep.together([(cell, seeds[0]) for cell in every])
    grid = [sweep.tune(cell, tuned, seeds[0]) for cell in grid]
  pairs = [(cell, seed) for cell in grid if cell for seed in seeds]
  sweep.together(pairs)
  found = [sweep.run(cell, seed) for cell, seed in pairs]
  return [one for one in found if one is not None]


def _arguments(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
  parser = argparse.ArgumentParser(
    prog="python launch/sweep.py",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "--config", action="append", required=True, help="path.py; several times"
  )
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument(
    "--grid", action="append", default=[], metavar="KEY=VALUE,..."
  )
  parser.add_argument("--tune", default="", metavar="KEY=VALUE,...")
  parser.add_argument("--seeds", default="0", help="such as 0,1,2")
  parser.add_argument(
    "--slurm", nargs="?", const="", metavar="KEY=VALUE,...", help="as jobs"
  )
  parser.add_argument("--dry_run", action="store_true")
  return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; a mistake ends in one message, before anything runs."""
  args, overrides = _arguments(argv)
  try:
    for given in overrides:
      if not given.startswith(("--config.", "--noconfig.")):
        raise UserError(
          f"{given!r} is no option of a sweep, nor --config.FIELD=VALUE."
        )
      if given.startswith("--config.seed"):
        raise UserError(f"{given}: give --seeds, such as --seeds 0,1,2.")
    try:
      seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
      raise UserError(
        f"--seeds={args.seeds}: give integers, such as 0,1,2."
      ) from None
    grid = [axis(text) for text in args.grid]
    tuned = axis(args.tune) if args.tune else None
    cells(args.config, [*grid, *([tuned] if tuned else [])])  # Checks them.
    if args.slurm is None:
      sweep = Sweep(args.workdir, overrides)
    else:
      sweep = SlurmSweep(args.workdir, overrides, slurm_parameters(args.slurm))
    found = run(
      sweep, cells(args.config, grid), tuned, seeds, dry_run=args.dry_run
    )
  except KeyboardInterrupt:
    interrupts.leave("what has results is not run again.")
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  if found:
    print("\n" + results.markdown(results.summarise(found)))
  if sweep.failed:
    listed = "\n  ".join(f"{k}: {v}" for k, v in sweep.failed.items())
    sys.exit(f"error: runs that failed, with their exit status:\n  {listed}")


if __name__ == "__main__":
  main()
