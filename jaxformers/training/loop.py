"""The one training loop: `run(config, workdir)` trains, scores and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxformers import config as configs
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import DivergedError, UserError
from jaxformers.tasks import Task
from jaxformers.training import (
  disk,
  origin,
  processes,
  provenance,
  resume,
  rules,
  summary,
)
from jaxformers.training.checkpoint import Checkpoints, Restored
from jaxformers.training.evaluate import Evaluator, add_sums, make_evaluator
from jaxformers.training.preemption import STOP_SIGNALS, Preemption
from jaxformers.training.progress import Progress
from jaxformers.training.progress import line as show_line
from jaxformers.training.run import Run, open_run, open_trained_run
from jaxformers.training.state import LoopState
from jaxformers.training.trainer import Trainer, begin
from jaxformers.training.writers import Writers

PROFILED = (10, 20)  # --profile traces the steps from the 10th to the 19th.


def run(
  config: Mapping[str, Any],
  workdir: str | Path,
  *,
  task: Task | None = None,
  chosen: Collection[str] | None = None,
  eval_only: bool = False,
  profile: bool = False,
  began: float | None = None,
) -> dict[str, Any]:
  """Trains from the latest checkpoint, if any, to the end; scores the test.

  Args:
    config: config of the run, as `jaxformers.config.base` makes it.
    workdir: folder for checkpoints, metrics and results; made if it is missing.
    task: task of a user's own examples; None for that of the config.
    chosen: paths of the fields that the user has set; see `open_run`.
    eval_only: True to score the best checkpoint, and do nothing else.
    profile: True to write a trace of ten steps to `workdir`/profile.
    began: value of `time.perf_counter` at the start of the process, from which
      the wall time is counted; None for the time of this call.

  Returns:
    The content of `results.json`.

  Raises:
    UserError: for a config that cannot be trained, a workdir of another, or
      one in which another run works.
    DivergedError: at the first loss that is not finite, naming the step.
    OSError: if the disk of the workdir is full or absent; what was saved before
      is untouched.
    SystemExit: with 143 after SIGTERM, with 130 after Ctrl-C, when everything
      is saved.
    KeyboardInterrupt: at a second Ctrl-C, or at one outside training.
  """
  began = time.perf_counter() if began is None else began
  show_line(f"Workdir: {workdir}")
  workdir = Path(workdir).absolute()
  if eval_only:
    return _score_again(config, workdir, chosen, began)
  resume.check_writable(workdir)
  with contextlib.ExitStack() as stack:
    if processes.is_first():
      stack.enter_context(resume.locked(workdir))
    opened = open_run(config, workdir, task, chosen)
    if processes.has_peers():  # One process has nothing to hash its code for.
      processes.require_same(_identity(opened))
    # A run that has ended is not run again.
    if not profile:
      identity = (workdir, opened.config, opened.task.description())
      results = resume.finished_results(*identity)
      if processes.broadcast_from_first(results is not None):
        begin(opened)
        show_line(
          f"This run has ended at step {opened.config.total_steps}: nothing "
          "was trained. Its results are those of results.json."
        )
        return results or resume.finished_results(*identity) or {}
    for text in summary.introduction(opened):
      show_line(text)
    return _train_and_score(Trainer(opened, began), profile)


# Fields that are paths, which may have another name on each host.
_PATHS = ("data_dir", "pretrained", "task.archive", "task.vocabulary")


def _identity(run: Run) -> dict[str, Any]:
  """Returns all that the processes of a run must have in common."""
  fields = {
    f"config.{name}": value
    for name, value in configs.flatten(run.config.as_dict()).items()
    if name not in _PATHS
  }
  about = {f"data {k}": v for k, v in run.task.description().items()}
  return {
    **fields,
    **about,
    "code": provenance.code_digest(),
    **{f"version of {k}": v for k, v in provenance.versions().items()},
  }


def _train_and_score(trainer: Trainer, profile: bool) -> dict[str, Any]:
  """Trains in a workdir that no other run writes to, and scores the best."""
  run = trainer.run
  with run.checkpoints() as checkpoints, contextlib.ExitStack() as logs:
    # Continue from the latest checkpoint.
    loop_state = LoopState()
    latest = checkpoints.restore_latest(trainer.state)
    if latest is not None:
      trainer.state, loop_state = latest[0], LoopState(**latest[1])
      trainer.carried_seconds = loop_state.wall_seconds
    begin(run, trainer.origin)
    start = int(jax.device_get(trainer.state.step))
    with Preemption() as preemption:
      needed = _plan(trainer, start, profile)
      # Nothing is logged of a run that does not fit its devices.
      writers = Writers(run.workdir, start, run.config, run.task.protocol)
      logs.enter_context(writers)
      _train(
        trainer,
        loop_state,
        checkpoints,
        writers,
        preemption,
        start=start,
        needed=needed,
        profile=profile,
      )
    # Score the best one.
    best = checkpoints.restore_best(trainer.state.without_optimizer())
    seconds = loop_state.train_seconds
    began = time.perf_counter() - trainer.wall_seconds()
    results = _score_test(run, best, trainer.evaluate, seconds, began)
    writers.write_results(results)
  if processes.is_first():
    with disk.saving("results.json", run.workdir):
      workdirs.write(run.workdir, "results.json", results)
  processes.wait_for_all("results")
  return results


def _score_test(
  run: Run, best: Restored, evaluate: Evaluator, seconds: float, began: float
) -> dict[str, Any]:
  """Scores the best state on the test split; returns the results of the run.

  Args:
    run: run that is scored.
    best: best checkpoint of the run.
    evaluate: evaluator of its parameters.
    seconds: training time of the run.
    began: value of `time.perf_counter` from which the wall time is counted.
  """
  test = run.task.splits["test"]
  with Progress(len(test), 0, "test", unit="example") as progress:
    tick = functools.partial(progress.update, batch_size=1)
    scores = evaluate(best.state.scored, test, tick)
  baselines = rules.scores(run.task, run.config.data_dir, show_line)
  return summary.describe_results(
    run, scores, best, baselines, train_seconds=seconds, began=began
  )


def _score_again(
  config: Mapping[str, Any],
  workdir: Path,
  chosen: Collection[str] | None,
  began: float,
) -> dict[str, Any]:
  """Scores the best checkpoint of a trained run; writes nothing."""
  # Parameters alone, on the devices that there are now.
  run = open_trained_run(workdir, config, chosen)
  with run.checkpoints() as checkpoints:
    best = checkpoints.restore_best(run.scored_template())
  seconds = best.loop_state["train_seconds"]
  results = _score_test(run, best, make_evaluator(run), seconds, began)
  # Times are those of the run, not of scoring it again.
  if (workdir / "results.json").exists():
    before = workdirs.read_results(workdir)
    kept = ("train_seconds", "wall_seconds", "metrics_records")
    results |= {key: before[key] for key in kept if key in before}
  return results


def _plan(trainer: Trainer, start: int, profile: bool) -> int:
  """Returns the bytes that a step needs on one device; 0 if none is left.

  Raises:
    UserError: if a step does not fit, or if too few are left for a profile.
  """
  left = trainer.run.config.total_steps - start
  if profile and left < PROFILED[1]:
    raise UserError(
      f"--profile needs {PROFILED[1]} steps, and {left} are left: raise "
      "config.total_steps, or choose a new --workdir."
    )
  return trainer.plan() if left else 0


def _train(
  trainer: Trainer,
  loop_state: LoopState,
  checkpoints: Checkpoints,
  writers: Writers,
  preemption: Preemption,
  *,
  start: int,
  needed: int,
  profile: bool,
) -> None:
  """Trains to the end, or to where patience ends; updates `loop_state`."""
  c = trainer.run.config
  total, folder = c.total_steps, trainer.run.workdir / "profile"
  if start == total:
    return
  title = f"{c.model.name} on {trainer.task.name}"
  with (
    Progress(total, start, title) as progress,
    contextlib.closing(trainer.batches(start)) as batches,
    contextlib.ExitStack() as trace,
  ):
    # `batches` reads ahead in a thread, and `trace` holds an open profile.
    loop = _Loop(trainer, loop_state, checkpoints, writers, progress)
    loop.announce(start, needed)
    for step in range(start + 1, total + 1):
      if loop.is_out_of_patience():
        break
      if profile and step == start + PROFILED[0]:
        trace.enter_context(jax.profiler.trace(folder))
      loop.step(step, next(batches))
      if step == start + 1:  # It compiles: wait for it, and do not measure it.
        loop.announce_first_step()
      if step == start + PROFILED[1] - 1:
        loop.settle()  # The trace holds the end of its last step.
        trace.close()
      stop = preemption.stop_signal(step)  # Once: it may change while we save.
      loop.boundary(step, bool(stop))
      if stop:
        loop.leave(step, stop)
    # Steps after the last checkpoint, where patience ended the run.
    loop.update_times()


@dataclasses.dataclass
class _Loop:
  """Work of a step and of the boundaries between steps."""

  trainer: Trainer
  loop_state: LoopState
  checkpoints: Checkpoints
  writers: Writers
  progress: Progress

  def __post_init__(self) -> None:
    self.config = self.trainer.run.config
    self._metric = self.trainer.run.objective.metric
    self._carried_seconds = self.loop_state.train_seconds
    # Step that has been started but not read, and its sums.
    self._waiting: tuple[int, Any] | None = None

  def announce(self, start: int, needed: int) -> None:
    """Shows what a run begins with, and warns of a schedule of only warm-up.

    Args:
      start: step that the run continues from.
      needed: bytes that a step needs on each device; 0 if not known.
    """
    total = self.config.total_steps
    if start:
      self.progress.line(f"Going on from step {start} of {total}.")
    if self.trainer.origin:
      self.progress.line(origin.describe(self.trainer.origin))
    warmup_steps = self.config.schedule.warmup_steps
    if total <= warmup_steps:
      self.progress.line(
        f"Note: schedule.warmup_steps={warmup_steps} is not less than "
        f"total_steps={total}, so the whole run is warm-up. Set both, such "
        f"as --config.schedule.warmup_steps={total // 10}."
      )
    if needed:
      parts = self.trainer.parts
      of_parts = f" in {parts} parts" if parts > 1 else ""
      size = f"{needed / 2**20:,.1f} MiB"
      self.progress.line(
        f"Memory: a step{of_parts} needs {size} on each device."
      )

  def announce_first_step(self) -> None:
    """Waits for the first step, and shows when it was done."""
    self.settle()
    seconds = self.trainer.wall_seconds()
    self.progress.line(f"First step done {seconds:.1f} s after the start.")

  def is_out_of_patience(self) -> bool:
    """Returns True, and says so, where evaluations have stopped improving."""
    worse = self.loop_state.worse
    if not 0 < self.config.patience <= worse:
      return False
    self.progress.line(
      f"Stopped early: no better for {worse} evaluations. A greater "
      "config.patience goes on."
    )
    return True

  def leave(self, step: int, signal: int) -> None:
    """Ends the process, which a launcher or the user starts again.

    Args:
      step: last step, which is saved.
      signal: number of the signal that stops the run.
    """
    self.checkpoints.wait()
    name = STOP_SIGNALS[signal]
    self.progress.line(f"{name}: saved step {step}; run again to go on.")
    sys.exit(128 + signal)

  def update_times(self) -> None:
    """Adds the times of this process to those of the processes before it."""
    seconds = self.progress.clock.seconds
    self.loop_state.train_seconds = self._carried_seconds + seconds
    self.loop_state.wall_seconds = self.trainer.wall_seconds()

  def step(self, step: int, batch: Any) -> None:
    """Starts a step, and reads the sums of the one before meanwhile."""
    trainer = self.trainer
    processes.restart_stall_timer()
    # Under jit no array moves by itself; pmap copies the state to its devices.
    guard = "disallow" if self.config.parallel == "jit" else "allow"
    with jax.transfer_guard(guard):
      trainer.state, sums = trainer.train_step(trainer.state, batch)
    # The device is at work on this step while the host reads the last sums.
    self.settle()
    self._waiting = (step, sums)

  def settle(self) -> None:
    """Waits for the last step and adds its sums, which must be finite."""
    if self._waiting is None:
      return
    (step, sums), self._waiting = self._waiting, None
    self.loop_state.window = add_sums(self.loop_state.window, sums)
    # One term that is not finite makes its sum so.
    if not math.isfinite(self.loop_state.window["objective"]):
      saved = self.checkpoints.steps()
      raise DivergedError(
        f"The loss of step {step} is not finite. The latest checkpoint is of "
        f"step {saved[-1] if saved else 'none'}; lower the learning rate, "
        "clip gradients, or look at the data of that step."
      )
    self.progress.update(step, self.config.batch_size)

  def boundary(self, step: int, is_preempted: bool) -> None:
    """Logs, evaluates and saves where it is due after a step."""
    # The last step is logged, evaluated and saved whatever the intervals are.
    c = self.config
    is_last = step == c.total_steps
    is_log, is_evaluation, is_checkpoint = (
      is_last or step % steps == 0
      for steps in (c.log_steps, c.eval_steps, c.checkpoint_steps)
    )
    if is_log:
      self._log(step)
    score = self._evaluate(step) if is_evaluation else None
    if is_evaluation or is_checkpoint or is_preempted:
      self.settle()
      with self.progress.phase("saving"):
        self.update_times()
        # Memory that a resumed run needs besides its state.
        content = dataclasses.asdict(self.loop_state)
        self.checkpoints.save(self.trainer.state, content, score)

  def _log(self, step: int) -> None:
    """Writes the means over all steps since the last log line."""
    self.settle()
    # A new window begins with the next step.
    means = self.trainer.run.objective.means(self.loop_state.window)
    self.loop_state.window = {}
    batch_size = self.config.batch_size
    schedule = self.trainer.run.schedule
    assert schedule is not None  # The run has an optimiser.
    scalars = {
      **_without_count("train", means),
      # The rate of the update that led to this step.
      "learning_rate": float(schedule(step - 1)),
      "examples_per_second": self.progress.clock.rate() * batch_size,
    }
    self.writers.write(step, scalars)
    self.progress.line(
      f"step {step}/{self.config.total_steps}  "
      f"{summary.format_scores(means, self._metric)}  "
      f"{self.progress.speed(step, batch_size)}"
    )

  def _evaluate(self, step: int) -> float:
    """Scores the selection split; returns the score that selects."""
    self.settle()
    trainer, loop_state = self.trainer, self.loop_state
    # The split called validation is the test split under some protocols.
    split, task = trainer.run.selection_split, trainer.task
    name = summary.split_title(task.name, task.selection)

    def tick(count: int) -> None:
      self.progress.show_alive(f"{name}: {count:,}/{len(split):,} examples")

    with self.progress.phase(name):
      scores = trainer.evaluate(trainer.state.scored, split, tick)
    self.writers.write(step, _without_count("validation", scores))
    if not math.isfinite(scores["loss"]):
      raise DivergedError(
        f"The {name} loss after step {step} is not finite; that step was not "
        f"saved. Whole checkpoints: {self.checkpoints.steps() or 'none'}."
      )
    # Compare with the best so far, for patience.
    score = trainer.run.selection_score(scores)
    note = ""
    loop_state.worse += 1
    if not loop_state.best or score > loop_state.best["score"]:
      loop_state.best, loop_state.worse = {"step": step, "score": score}, 0
      note = " (best so far)"
    unit = summary.UNITS.get(self._metric, "examples")
    self.progress.line(
      f"step {step}  {name} {summary.format_scores(scores, self._metric)}, "
      f"{scores['count']:,} {unit}{note}"
    )
    return score


def _without_count(prefix: str, means: Mapping[str, Any]) -> dict[str, Any]:
  """Returns means as scalars of a prefix, such as "train/loss"."""
  return {f"{prefix}/{key}": means[key] for key in means if key != "count"}
