"""The one training loop: `run(config, workdir)` trains, scores and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxformers import workdirs
from jaxformers.errors import DivergedError, UserError
from jaxformers.training import evaluate, processes, report, resume
from jaxformers.training.checkpoint import Checkpoints, Restored
from jaxformers.training.progress import Progress
from jaxformers.training.run import Memo, Run
from jaxformers.training.writers import Writers

PROFILED = (10, 20)  # --profile traces the steps from the 10th to the 19th.
# What ends a run after the step under way, and what it is called.
STOPPING = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Preemption:
  """Notes SIGTERM and Ctrl-C, so that the loop can save and stop between steps.

  A second Ctrl-C interrupts at once. Of several processes any may be sent
  either signal, and all stop after the same step: JAX takes SIGTERM there and
  tells the others.
  """

  def __init__(self) -> None:
    self._noted = 0
    self._together = jax.process_count() > 1
    self._before: dict[int, Any] = {}

  def asked(self, step: int) -> int:
    """Returns the signal that asks to stop, or 0. Called after every step."""
    if self._together:
      return signal.SIGTERM if processes.asked_to_stop(step) else 0
    return self._noted

  def __enter__(self) -> Preemption:
    # Python lets the main thread alone take signals; a notebook's may be none.
    if threading.current_thread() is not threading.main_thread():
      return self
    signals = [signal.SIGINT] if self._together else list(STOPPING)
    for number in signals:
      # A shell has its background processes ignore Ctrl-C.
      if signal.getsignal(number) is not signal.SIG_IGN:
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number: int, _: object) -> None:
    if number == signal.SIGINT:
      if self._noted == number:
        raise KeyboardInterrupt
      # Not print, which may be what was interrupted.
      os.write(2, b"\nSaving after this step; Ctrl-C again stops at once.\n")
      if self._together:
        os.kill(os.getpid(), signal.SIGTERM)
    self._noted = number


def run(
  config: Mapping[str, Any],
  workdir: str | Path,
  *,
  eval_only: bool = False,
  profile: bool = False,
) -> dict[str, Any]:
  """Trains from the latest checkpoint, if any, to the end; scores the test.

  Args:
    config: as `jaxformers.config.base` makes it.
    workdir: for checkpoints, metrics and results; made if it is not there.
    eval_only: restore the best checkpoint and score it, nothing else.
    profile: write a trace of ten steps to `workdir`/profile.

  Returns:
    The content of `results.json`.

  Raises:
    UserError: for a config that cannot be, or a workdir of another.
    FloatingPointError: at the first loss that is not finite, naming the step.
    BlockingIOError: if another run works in the workdir.
    OSError: if the store was full, or away, for longer than the config waits;
      what was saved before is untouched.
    SystemExit: with 143 after SIGTERM, with 130 after Ctrl-C, when everything
      is saved.
    KeyboardInterrupt: at a second Ctrl-C, or at one outside training.
  """
  workdir = Path(workdir).absolute()
  with contextlib.ExitStack() as stack:
    if not eval_only:
      resume.check_writable(workdir)
      if processes.is_first():
        stack.enter_context(resume.locked(workdir))
    return _run(Run(config, workdir, eval_only=eval_only), eval_only, profile)


def _run(this: Run, eval_only: bool, profile: bool) -> dict[str, Any]:
  """Does what `run` says, in a workdir that no other run writes to."""
  if not eval_only and not profile:
    results = this.finished_results()
    if processes.agreed(results is not None):
      this.begin()
      return results or this.finished_results()
  about = this.task.description()
  with Checkpoints(this.store, about, this.config) as checkpoints:
    memo = Memo()
    if not eval_only:
      latest = checkpoints.restore_latest(this.state)
      if latest is not None:
        this.state, memo = latest[0], Memo(**latest[1])
        this.carried_seconds = memo.wall_seconds
      this.begin()
      with Preemption() as preemption:
        memo = _train(this, memo, checkpoints, preemption, profile)
    best = checkpoints.restore_best(this.state)
    memo = Memo(**best.memo) if eval_only else memo
    return _finish(this, memo, best, eval_only)


def _finish(
  this: Run, memo: Memo, best: Restored, eval_only: bool
) -> dict[str, Any]:
  """Scores the test split with the best state and writes `results.json`."""
  test = this.task.splits["test"]
  with Progress(len(test), 0, "test") as progress:
    scores = this.evaluate(
      best.state.scored, test, lambda done: progress.update(done, 1)
    )
  results = this.results(scores, best, memo)
  if not eval_only and processes.is_first():
    this.store.patiently(
      "results.json",
      lambda: workdirs.write(this.workdir, "results.json", results),
    )
  elif eval_only and (this.workdir / "results.json").exists():
    # These are of the run, not of scoring again.
    before = workdirs.read_results(this.workdir)
    kept = ("train_seconds", "wall_seconds", "metrics_records")
    results |= {key: before[key] for key in kept if key in before}
  processes.wait("results")  # The first may wait for its store.
  return results


def _train(
  this: Run,
  memo: Memo,
  checkpoints: Checkpoints,
  preemption: Preemption,
  profile: bool,
) -> Memo:
  """Trains to the end, or to where patience ends; returns the last memo."""
  c = this.config
  start, total = int(jax.device_get(this.state.step)), c["total_steps"]
  title = f"{c['model']['name']} on {this.task.name}"
  if profile and total - start < PROFILED[1]:
    raise UserError(
      f"--profile needs {PROFILED[1]} steps, and {total - start} are left: "
      "raise config.total_steps, or choose a new --workdir."
    )
  if start == total:
    return memo
  with (
    Writers(this.store, start, c) as writers,
    Progress(total, start, title) as progress,
    contextlib.closing(this.batches(start)) as batches,
    contextlib.ExitStack() as trace,
  ):
    loop = _Loop(this, memo, checkpoints, writers, progress)
    if start:
      progress.line(f"Going on from step {start} of {total}.")
    if total <= (warmup := c["schedule"].get("warmup_steps", 0)):
      progress.line(
        f"Note: schedule.warmup_steps={warmup} is not less than total_steps="
        f"{total}, so the whole run is warm-up. Set both, such "
        f"as --config.schedule.warmup_steps={total // 10}."
      )
    for step in range(start + 1, total + 1):
      if loop.stopped():
        progress.line(
          f"Stopped early: no better for {memo.worse} evaluations. A greater "
          "config.patience goes on."
        )
        break
      if profile and step == start + PROFILED[0]:
        trace.enter_context(jax.profiler.trace(this.workdir / "profile"))
      loop.step(step, next(batches))
      if step == start + PROFILED[1] - 1:
        loop.settle()
        trace.close()
      asked = preemption.asked(step)  # Once: it may change while we save.
      loop.boundary(step, bool(asked))
      if asked:
        checkpoints.wait()
        progress.line(
          f"{STOPPING[asked]}: saved step {step}; run again to go on."
        )
        sys.exit(128 + asked)
    memo.train_seconds += loop.unsaved_seconds()
  return memo


class _Loop:
  """Work of a step and of the boundaries between steps."""

  def __init__(
    self,
    this: Run,
    memo: Memo,
    checkpoints: Checkpoints,
    writers: Writers,
    progress: Progress,
  ) -> None:
    self.run, self.memo, self.checkpoints = this, memo, checkpoints
    self.writers, self.progress = writers, progress
    self._waiting: tuple[int, Any] | None = None
    self._first = True
    self._clocked = 0.0

  def stopped(self) -> bool:
    """Returns True if patience has ended."""
    return 0 < self.run.config["patience"] <= self.memo.worse

  def unsaved_seconds(self) -> float:
    """Training time that is not in the memo yet."""
    new = self.progress.clock.seconds - self._clocked
    self._clocked = self.progress.clock.seconds
    return new

  def step(self, step: int, batch: Any) -> None:
    """Starts a step, and reads the sums of the one before meanwhile."""
    this = self.run
    processes.alive()
    with jax.transfer_guard(self._guard()):
      this.state, sums = this.train_step(this.state, batch)
    self.settle()
    self._waiting = (step, sums)
    if self._first:  # It compiles, so it is waited for and not measured.
      self._first = False
      self.settle()
      self.progress.line(
        f"First step done {this.wall_seconds():.1f} s after the start."
      )

  def _guard(self) -> str:
    # pmap copies the state to its devices itself.
    return "disallow" if self.run.config["parallel"] == "jit" else "allow"

  def settle(self) -> None:
    """Waits for the last step and adds its sums, which must be finite."""
    if self._waiting is None:
      return
    step, sums = self._waiting
    self._waiting = None
    self.memo.window = evaluate.add(self.memo.window, sums)
    if not math.isfinite(self.memo.window["objective"]):
      saved = self.checkpoints.steps()
      raise DivergedError(
        f"The loss of step {step} is not finite. The latest checkpoint is of "
        f"step {saved[-1] if saved else 'none'}; lower the learning rate, "
        "clip gradients, or look at the data of that step."
      )
    self.progress.update(step, self.run.config["batch_size"])

  def boundary(self, step: int, preempted: bool) -> None:
    """Logs, evaluates and saves where it is due after a step."""
    c = self.run.config
    last = step == c["total_steps"]
    if step % c["log_steps"] == 0 or last:
      self._log(step)
    score = None
    if step % c["eval_steps"] == 0 or last:
      score = self._evaluate(step)
    if score is not None or step % c["checkpoint_steps"] == 0 or preempted:
      self.settle()
      with self.progress.phase("saving"):
        self.memo.train_seconds += self.unsaved_seconds()
        self.memo.wall_seconds = self.run.wall_seconds()
        memo = dataclasses.asdict(self.memo)
        self.checkpoints.save(self.run.state, memo, score)

  def _log(self, step: int) -> None:
    self.settle()
    means = self.run.objective.means(self.memo.window)
    self.memo.window = {}
    c = self.run.config
    clock = self.progress.clock
    scalars = {
      **{f"train/{key}": means[key] for key in means if key != "count"},
      "learning_rate": float(self.run.schedule(step - 1)),
      "examples_per_second": clock.rate() * c["batch_size"],
    }
    self.writers.write(step, scalars)
    self.progress.line(
      f"step {step}/{c['total_steps']}  {report.scores(means, self._metric())}"
      f"  {self.progress.speed(step, c['batch_size'])}"
    )

  def _metric(self) -> str:
    return self.run.objective.metric

  def _evaluate(self, step: int) -> float:
    self.settle()
    this, memo = self.run, self.memo
    name = this.task.selection
    with self.progress.phase(name):
      # The split called validation is the test split under some protocols.
      split = this.task.splits["validation"]
      scores = this.evaluate(this.state.scored, split)
    self.writers.write(
      step,
      {f"validation/{key}": scores[key] for key in scores if key != "count"},
    )
    if not math.isfinite(scores["loss"]):
      raise DivergedError(
        f"The {name} loss after step {step} is not finite; that step was not "
        f"saved. Whole checkpoints: {self.checkpoints.steps() or 'none'}."
      )
    score = scores[this.config["select"]] * (1 if this.higher else -1)
    better = not memo.best or score > memo.best["score"]
    if better:
      memo.best, memo.worse = {"step": step, "score": score}, 0
    else:
      memo.worse += 1
    self.progress.line(
      f"step {step}  {name} {report.scores(scores, self._metric())}, "
      f"{scores['count']:,} {report.UNITS.get(self._metric(), 'examples')}"
      + (" (best so far)" if better else "")
    )
    return score
