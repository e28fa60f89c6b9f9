"""The training loop: `run(config, workdir)` trains, scores and reports."""

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
from jaxformers.training.evaluate import (
  Evaluator,
  add_sums,
  make_evaluator,
  score_by_length,
)
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
  """Trains a run to its end and scores it on the test split.

  Training continues from the latest checkpoint, if there is one.

  Args:
    config: config of the run, as `jaxformers.config.base` makes it.
    workdir: folder for checkpoints, metrics and results; created if missing.
    task: task of the caller's own examples; None for the task of the config.
    chosen: paths of the fields that the user has set; see `open_run`.
    eval_only: True to score the best checkpoint without training.
    profile: True to write a trace of ten steps to `workdir`/profile.
    began: value of `time.perf_counter` at the start of the process, from which
      the wall time is counted; None to count from this call.

  Returns:
    The content of `results.json`.

  Raises:
    UserError: if the config cannot be trained, or if the workdir belongs to a
      run of another config or is in use by another run.
    DivergedError: at the first loss that is not finite, naming the step.
    OSError: if the disk of the workdir is full or absent; everything saved
      before is untouched.
    SystemExit: after everything is saved: with status 143 after SIGTERM, and
      with 130 after Ctrl-C.
    KeyboardInterrupt: at a second Ctrl-C, or at a Ctrl-C outside training.
  """
  began = time.perf_counter() if began is None else began
  show_line(f"Workdir: {workdir}")
  workdir = Path(workdir).absolute()
  if eval_only:
    return _score_again(config, workdir, chosen, began)
  # Check that the workdir can be written, and lock it.
  resume.check_writable(workdir)
  with contextlib.ExitStack() as stack:
    if processes.is_first():
      stack.enter_context(resume.locked(workdir))
    # Check the config, prepare the data and build the model.
    opened = open_run(config, workdir, task, chosen)
    # All processes need the same config, data and code.
    if processes.has_peers():
      processes.require_same(_identity(opened))
    # A finished run is not trained again.
    if not profile:
      identity = (workdir, opened.config, opened.task.description())
      results = resume.finished_results(*identity)
      if processes.broadcast_from_first(results is not None):
        begin(opened, keeps_config=True)
        show_line(
          "This run has ended (config.total_steps="
          f"{opened.config.total_steps}): nothing was trained. Its results are "
          "in results.json."
        )
        return results or resume.finished_results(*identity) or {}
    # Describe the run, then train it.
    for text in summary.introduction(opened):
      show_line(text)
    return _train_and_score(Trainer(opened, began), profile)


# Fields that hold paths, which may differ between hosts.
_PATHS = ("data_dir", "pretrained", "task.archive", "task.vocabulary")


def _identity(run: Run) -> dict[str, Any]:
  """Returns everything that the processes of a run must have in common."""
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
  """Trains in a locked workdir, then scores the best checkpoint."""
  run = trainer.run
  processes.restart_stall_timer()
  with run.checkpoints() as checkpoints, contextlib.ExitStack() as logs:
    # Continue from the latest checkpoint.
    loop_state = LoopState()
    latest = checkpoints.restore_latest(trainer.state)
    if latest is not None:
      trainer.state, loop_state = latest[0], LoopState(**latest[1])
      trainer.carried_seconds = loop_state.wall_seconds
    if provenance.commit() not in loop_state.commits:
      loop_state.commits.append(provenance.commit())
    begin(run, trainer.origin)
    start = int(jax.device_get(trainer.state.step))
    with Preemption() as preemption:
      needed = _plan(trainer, start, profile)
      # Open the logs only after the step is known to fit the device.
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
    # Score the best checkpoint on the test split.
    best = checkpoints.restore_best(trainer.state.without_optimizer())
    seconds = loop_state.train_seconds
    began = time.perf_counter() - trainer.wall_seconds()
    results = _score_test(run, best, trainer.evaluate, seconds, began)
    writers.write_results(results)
  # The first process writes the results, and the others wait for it.
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
    evaluate: evaluator of the model.
    seconds: training time of the run, in seconds.
    began: value of `time.perf_counter` from which the wall time is counted.
  """
  test = run.task.splits["test"]
  with Progress(len(test), 0, "test", unit="example") as progress:
    tick = functools.partial(progress.update, batch_size=1)
    scores = evaluate(best.state.scored, test, tick)
  scores |= score_by_length(run, best.state.scored)
  # Compare with the scores of the trivial rules.
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
  # Restore only the parameters, onto the devices that are visible now.
  run = open_trained_run(workdir, config, chosen)
  with run.checkpoints() as checkpoints:
    best = checkpoints.restore_best(run.scored_template())
  seconds = best.loop_state["train_seconds"]
  results = _score_test(run, best, make_evaluator(run), seconds, began)
  # Keep the times that the training has written into the results.
  if (workdir / "results.json").exists():
    before = workdirs.read_results(workdir)
    kept = ("train_seconds", "wall_seconds", "metrics_records")
    results |= {key: before[key] for key in kept if key in before}
  return results


def _plan(trainer: Trainer, start: int, profile: bool) -> int:
  """Returns the memory of a step on one device, in bytes.

  The result is 0 if no step is left, or if the memory is unknown.

  Raises:
    UserError: if a step does not fit, or if too few steps are left to profile.
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
  """Trains to the last step or until patience runs out.

  Updates `loop_state`.
  """
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
    # `batches` reads ahead in a thread; `trace` holds an open profile.
    loop = _Loop(trainer, loop_state, checkpoints, writers, progress)
    loop.announce(start, needed)
    for step in range(start + 1, total + 1):
      # Stop early if the evaluations no longer improve.
      if loop.is_out_of_patience():
        break
      # Trace the steps of `PROFILED`.
      if profile and step == start + PROFILED[0]:
        trace.enter_context(jax.profiler.trace(folder))
      # Start the step. The first one compiles: wait for it, and do not time it.
      loop.step(step, next(batches))
      if step == start + 1:
        loop.announce_first_step()
      if step == start + PROFILED[1] - 1:
        loop.settle()  # The trace must hold the end of its last step.
        trace.close()
      # Read the signal once: it may change while the state is saved.
      stop = preemption.stop_signal(step)
      loop.boundary(step, bool(stop))
      if stop:
        loop.leave(step, stop)
    # Count the steps after the last checkpoint, where patience ended the run.
    loop.update_times()


@dataclasses.dataclass
class _Loop:
  """Runs the steps, and logs, evaluates and saves between them."""

  trainer: Trainer
  loop_state: LoopState
  checkpoints: Checkpoints
  writers: Writers
  progress: Progress

  def __post_init__(self) -> None:
    self.config = self.trainer.run.config
    self._metric = self.trainer.run.objective.metric
    self._carried_seconds = self.loop_state.train_seconds
    # The step that has been started but not read yet, and its sums.
    self._waiting: tuple[int, Any] | None = None

  def announce(self, start: int, needed: int) -> None:
    """Shows where the run starts, and warns if the whole run is warm-up.

    Args:
      start: step that the run continues from.
      needed: bytes that a step needs on each device; 0 if unknown.
    """
    total = self.config.total_steps
    if start:
      self.progress.line(f"Resuming from step {start} of {total}.")
    if self.trainer.origin:
      self.progress.line(origin.describe(self.trainer.origin))
    warmup_steps = self.config.schedule.warmup_steps
    if total <= warmup_steps:
      self.progress.line(
        f"Note: schedule.warmup_steps={warmup_steps} is not less than "
        f"total_steps={total}, so the whole run is warm-up. Lower it, for "
        f"example by --config.schedule.warmup_steps={total // 10}."
      )
    if needed:
      parts = self.trainer.parts
      of_parts = f" in {parts} parts" if parts > 1 else ""
      size = f"{needed / 2**20:,.1f} MiB"
      self.progress.line(
        f"Memory: a step{of_parts} needs {size} on each device."
      )

  def announce_first_step(self) -> None:
    """Waits for the first step, and shows its time since the start."""
    self.settle()
    seconds = self.trainer.wall_seconds()
    self.progress.line(f"First step done {seconds:.1f} s after the start.")

  def is_out_of_patience(self) -> bool:
    """Returns True, and reports it, if evaluations have stopped improving."""
    worse = self.loop_state.worse
    if not 0 < self.config.patience <= worse:
      return False
    self.progress.line(
      f"Stopped early: no better for {worse} evaluations. Raise "
      "config.patience to continue."
    )
    return True

  def leave(self, step: int, signal: int) -> None:
    """Waits for the checkpoint, and exits with the status of the signal.

    A launcher or the user can then start the run again.

    Args:
      step: last step, which has been saved.
      signal: number of the signal that stops the run.
    """
    self.checkpoints.wait()
    name = STOP_SIGNALS[signal]
    self.progress.line(f"{name}: saved step {step}; run again to continue.")
    sys.exit(128 + signal)

  def update_times(self) -> None:
    """Adds the times of this process to the times of earlier processes."""
    seconds = self.progress.clock.seconds
    self.loop_state.train_seconds = self._carried_seconds + seconds
    self.loop_state.wall_seconds = self.trainer.wall_seconds()

  def step(self, step: int, batch: Any) -> None:
    """Starts a step, and meanwhile reads the sums of the previous one."""
    trainer = self.trainer
    processes.restart_stall_timer()
    # Forbid implicit transfers to devices under jit; pmap copies the state.
    # Compiling for another length may copy constants from a device.
    guard = "disallow" if self.config.parallel == "jit" else "allow"
    with (
      jax.transfer_guard_host_to_device(guard),
      jax.transfer_guard_device_to_device(guard),
    ):
      trainer.state, sums = trainer.train_step(trainer.state, batch)
    # The device computes this step while the host reads the previous sums.
    self.settle()
    self._waiting = (step, sums)

  def settle(self) -> None:
    """Waits for the started step, and adds its sums to the window.

    Raises:
      DivergedError: if the sums are not finite.
    """
    if self._waiting is None:
      return
    (step, sums), self._waiting = self._waiting, None
    self.loop_state.window = add_sums(self.loop_state.window, sums)
    # A single term that is not finite makes the whole sum not finite.
    if not math.isfinite(self.loop_state.window["objective"]):
      saved = self.checkpoints.steps()
      raise DivergedError(
        f"The loss of step {step} is not finite. Latest checkpoint: "
        f"step {saved[-1] if saved else 'none'}. Lower the learning rate, clip "
        "gradients, or look at the data of that step."
      )
    self.progress.update(step, self.config.batch_size)

  def boundary(self, step: int, is_preempted: bool) -> None:
    """Logs, evaluates and saves after a step, where each is due."""
    # The last step is always logged, evaluated and saved.
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
        # Everything besides the model state that a resumed run needs.
        content = dataclasses.asdict(self.loop_state)
        self.checkpoints.save(self.trainer.state, content, score)

  def _log(self, step: int) -> None:
    """Writes the means over all steps since the last log line."""
    self.settle()
    # The next step begins a new window.
    window, self.loop_state.window = self.loop_state.window, {}
    means = self.trainer.run.objective.means(window)
    batch_size = self.config.batch_size
    schedule = self.trainer.run.schedule
    assert schedule is not None  # The run has an optimiser.
    scalars = {
      **_without_count("train", means),
      # Learning rate of the update that led to this step.
      "learning_rate": float(schedule(step - 1)),
      "examples_per_second": self.progress.clock.rate() * batch_size,
    }
    note = ""
    if self.config.packing:
      # Steps since the last log line.
      steps = (step - 1) % self.config.log_steps + 1
      scalars["padding"] = 1 - float(window["tokens"] / window["places"])
      scalars["tokens_per_step"] = float(window["tokens"]) / steps
      note = (
        f"{scalars['tokens_per_step']:,.0f} tokens a step and "
        f"{scalars['padding']:.1%} padding, "
      )
    self.writers.write(step, scalars)
    self.progress.line(
      f"step {step}/{self.config.total_steps}  "
      f"{summary.format_scores(means, self._metric)}  "
      f"{note}{self.progress.speed(step, batch_size)}"
    )

  def _evaluate(self, step: int) -> float:
    """Scores the selection split; returns the score that ranks checkpoints."""
    self.settle()
    trainer, loop_state = self.trainer, self.loop_state
    # Under some protocols the selection split is the test split.
    split, task = trainer.run.selection_split, trainer.task
    name = summary.split_title(task.name, task.selection)

    def tick(count: int) -> None:
      self.progress.show_alive(f"{name}: {count:,}/{len(split):,} examples")

    with self.progress.phase(name):
      scores = trainer.evaluate(trainer.state.scored, split, tick)
    times = {"wall_seconds": trainer.wall_seconds()}
    self.writers.write(step, _without_count("validation", scores) | times)
    if not math.isfinite(scores["loss"]):
      raise DivergedError(
        f"The {name} loss after step {step} is not finite; that step was not "
        f"saved. Complete checkpoints: {self.checkpoints.steps() or 'none'}."
      )
    # Compare with the best score so far, for patience. Short examples may not
    # improve the score, so that their steps do not count.
    score = trainer.run.selection_score(scores)
    note = ""
    loop_state.worse += step > self.config.short_steps
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
  """Returns the means under names with a prefix, such as "train/loss"."""
  return {f"{prefix}/{key}": means[key] for key in means if key != "count"}
