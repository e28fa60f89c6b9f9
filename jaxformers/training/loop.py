"""The one training loop: `run(config, workdir)` trains, scores and reports."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxformers import config as configs
from jaxformers import models, tasks
from jaxformers.data.loader import TrainOrder, train_batch
from jaxformers.registry import call, choose
from jaxformers.tasks import Task
from jaxformers.training import evaluate, optim, parallel, report
from jaxformers.training import state as states
from jaxformers.training.checkpoint import Checkpoints
from jaxformers.training.progress import Progress
from jaxformers.training.steps import train_step
from jaxformers.training.writers import Writers

PROFILED = (10, 20)  # The steps that --profile traces, counted from the start.


class Preemption:
  """Notes SIGTERM, so that the loop can save and stop between two steps."""

  def __init__(self) -> None:
    self.asked = False

  def __enter__(self) -> Preemption:
    self._before = signal.signal(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    signal.signal(signal.SIGTERM, self._before)

  def _note(self, *_: object) -> None:
    self.asked = True


@dataclasses.dataclass
class Memo:
  """What a run remembers beside its state; plain JSON, saved with it.

  Attributes:
    window: sums since the last log line.
    best: step and score of the best evaluation so far; {} before the first.
    worse: evaluations since then.
    train_seconds, wall_seconds: of all processes that worked on the run, up to
      the checkpoint.
  """

  window: dict[str, float] = dataclasses.field(default_factory=dict)
  best: dict[str, float] = dataclasses.field(default_factory=dict)
  worse: int = 0
  train_seconds: float = 0.0
  wall_seconds: float = 0.0


class Run:
  """One run of one seed: everything that its config names, built and checked.

  Attributes:
    config: plain, as in `config.json`.
    workdir: absolute.
    task, model, state: from the config; state is that of step 0.
  """

  def __init__(self, config: Mapping[str, Any], workdir: Path) -> None:
    self.config = configs.plain(config)
    self.workdir = workdir
    self._began = time.perf_counter()
    self.carried_seconds = 0.0
    c = self.config
    choose("field config.select", c["select"], ("accuracy", "loss"))
    for field in ("total_steps", "log_steps", "eval_steps", "checkpoint_steps"):
      if c[field] < 1:
        raise ValueError(f"config.{field}={c[field]}: it must be at least 1.")
    devices = len(parallel.devices())
    parts = devices * c["accumulate"]
    what = f"{devices} device(s) in {c['accumulate']} part(s) each"
    parallel.check_batch("batch_size", c["batch_size"], parts, what)
    self.tx, self.schedule = optim.build(
        c["optimizer"], c["schedule"], c["total_steps"]
    )
    _claim(workdir, c)
    self.task = tasks.get(**c["task"], data_dir=c["data_dir"])
    self.model = _model(c["model"], self.task)
    self.reference = models.size(_model(c["reference"], self.task))
    create = functools.partial(states.create, self.model, self.tx)
    state = jax.jit(create, static_argnums=0)(c["seed"])
    self.state = parallel.place_state(state)
    self.train_step, self.place = parallel.compile_step(
        c["parallel"],
        functools.partial(
            train_step,
            model=self.model,
            tx=self.tx,
            seed=c["seed"],
            accumulate=c["accumulate"],
        ),
        donate=True,
    )
    self.evaluate = evaluate.Evaluator(
        self.model, c["parallel"], c["eval_batch_size"], self.task.max_len
    )
    self.order = TrainOrder(
        len(self.task.splits["train"]), c["batch_size"], c["seed"]
    )

  def batch(self, step: int) -> Any:
    """The batch of a step, counted from 0, on its devices."""
    indices = self.order(step)
    return self.place(
        train_batch(self.task.splits["train"], indices, self.task.max_len)
    )

  def wall_seconds(self) -> float:
    """Of this process, and of those before it up to their last checkpoint."""
    return self.carried_seconds + time.perf_counter() - self._began

  def results(
      self, scores: Mapping[str, Any], best_step: int, memo: Memo
  ) -> dict[str, Any]:
    """The content of `results.json`."""
    c, task = self.config, self.task
    size = models.size(self.model)
    return {
        "task": task.name,
        "protocol": task.protocol,
        "selection": task.selection,
        "model": c["model"]["name"],
        "seed": c["seed"],
        "accuracy": scores["accuracy"],
        "loss": scores["loss"],
        "examples": scores["count"],
        "best_step": best_step,
        "selection_score": memo.best["score"],
        "baselines": task.baselines(),
        "parameters": size,
        "parameter_ratio": size / self.reference,
        "train_seconds": memo.train_seconds,
        "wall_seconds": self.wall_seconds(),
        "commit": report.commit(),
        "hardware": report.hardware(),
        "versions": report.versions(),
        "data": dict(task.info),
        "max_len": task.max_len,
        "config": c,
    }


def _model(options: Mapping[str, Any], task: Task) -> models.Classifier:
  sizes = {
      "vocab_size": task.vocab_size,
      "max_len": task.max_len,
      "num_classes": task.num_classes,
  }
  return call("config.model", models.build, {**options, **sizes})


def _claim(workdir: Path, config: Mapping[str, Any]) -> None:
  """Makes the workdir this config's; ValueError if it is another's."""
  path = workdir / "config.json"
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
      report.write_json(path, config)
  except OSError as error:
    raise ValueError(
        f"The workdir {workdir} cannot be written ({error.strerror}): choose "
        "another --workdir."
    ) from None
  differing = configs.differences(json.loads(path.read_text()), config)
  if differing:
    raise ValueError(
        f"The workdir {workdir} belongs to a run of another config:\n  "
        + "\n  ".join(differing)
        + "\nUse that config again, or choose another --workdir."
    )


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
    ValueError: for a config that cannot be, or a workdir of another.
    FloatingPointError: at the first loss that is not finite, naming the step.
    OSError: if the disk is full; what was saved before is untouched.
    SystemExit: with 143, after SIGTERM, when everything is saved.
  """
  workdir = Path(workdir).absolute()
  this = Run(config, workdir)
  with Checkpoints(workdir) as checkpoints, Preemption() as preemption:
    memo = Memo()
    if not eval_only:
      latest = checkpoints.restore_latest(this.state)
      if latest is not None:
        this.state, memo = latest[0], Memo(**latest[1])
        this.carried_seconds = memo.wall_seconds
      memo = _train(this, memo, checkpoints, preemption, profile)
    best = checkpoints.best_step()
    if best is None:
      raise ValueError(
          f"There is no evaluated checkpoint in {workdir}: train first, without "
          "--eval_only."
      )
    state, saved = checkpoints.restore(best, this.state)
    memo = Memo(**saved) if eval_only else memo
    return _finish(this, state, memo, best, eval_only)


def _finish(
    this: Run, state: states.TrainState, memo: Memo, best: int, eval_only: bool
) -> dict[str, Any]:
  """Scores the test split with the best state and writes `results.json`."""
  path = this.workdir / "results.json"
  if path.exists() and not eval_only:
    return json.loads(path.read_text())  # This run was finished before.
  test = this.task.splits["test"]
  with Progress(len(test), 0, "test") as progress:
    scores = this.evaluate(
        state.params, test, lambda done: progress.update(done, 1)
    )
  results = this.results(scores, best, memo)
  if not eval_only:
    report.write_json(path, results)
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
  loop = _Loop(this, memo, checkpoints)
  with (
      Writers(this.workdir, start, c) as writers,
      Progress(total, start, title) as progress,
  ):
    loop.writers, loop.progress = writers, progress
    if start:
      progress.line(f"Going on from step {start} of {total}.")
    for step in range(start + 1, total + 1):
      if loop.stopped():
        progress.line(f"Stopped early: no better for {memo.worse} evaluations.")
        break
      if profile and step == start + PROFILED[0]:
        jax.profiler.start_trace(this.workdir / "profile")
      loop.step(step)
      if profile and step == start + PROFILED[1]:
        loop.settle()
        jax.profiler.stop_trace()
      loop.boundary(step, preemption.asked)
      if preemption.asked:
        checkpoints.wait()
        progress.line(f"SIGTERM: saved step {step}; run again to go on.")
        sys.exit(128 + signal.SIGTERM)
    memo.train_seconds += loop.unsaved_seconds()
  return memo


class _Loop:
  """What happens at a step and at the boundaries between steps."""

  writers: Writers
  progress: Progress

  def __init__(self, this: Run, memo: Memo, checkpoints: Checkpoints) -> None:
    self.run, self.memo, self.checkpoints = this, memo, checkpoints
    self._waiting: tuple[int, Any] | None = None
    self._first = True
    self._clocked = 0.0

  def stopped(self) -> bool:
    """Whether patience has ended."""
    return 0 < self.run.config["patience"] <= self.memo.worse

  def unsaved_seconds(self) -> float:
    """Training time that is not in the memo yet."""
    new = self.progress.clock.seconds - self._clocked
    self._clocked = self.progress.clock.seconds
    return new

  def step(self, step: int) -> None:
    """Starts a step, and reads the sums of the one before meanwhile."""
    this = self.run
    batch = this.batch(step - 1)
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
    """Waits for the last step and adds its sums; stops if they are not finite."""
    if self._waiting is None:
      return
    step, sums = self._waiting
    self._waiting = None
    self.memo.window = evaluate.add(self.memo.window, sums)
    if not math.isfinite(self.memo.window["loss"]):
      saved = self.checkpoints.steps()
      raise FloatingPointError(
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
    means = evaluate.divide(self.memo.window)
    self.memo.window = {}
    c = self.run.config
    clock = self.progress.clock
    scalars = {
        "train/loss": means["loss"],
        "train/accuracy": means["accuracy"],
        "learning_rate": float(self.run.schedule(step - 1)),
        "examples_per_second": clock.rate() * c["batch_size"],
    }
    self.writers.write(step, scalars)
    self.progress.line(
        f"step {step}/{c['total_steps']}  loss {means['loss']:.4f}  accuracy "
        f"{means['accuracy']:.2%}  {self.progress.speed(step, c['batch_size'])}"
    )

  def _evaluate(self, step: int) -> float:
    self.settle()
    this, memo = self.run, self.memo
    name = this.task.selection
    with self.progress.phase(name):
      # The split called validation is the test split under some protocols.
      split = this.task.splits["validation"]
      scores = this.evaluate(this.state.params, split)
    self.writers.write(
        step,
        {
            "validation/loss": scores["loss"],
            "validation/accuracy": scores["accuracy"],
        },
    )
    accurate = this.config["select"] == "accuracy"
    score = scores["accuracy"] if accurate else -scores["loss"]
    better = not memo.best or score > memo.best["score"]
    if better:
      memo.best, memo.worse = {"step": step, "score": score}, 0
    else:
      memo.worse += 1
    self.progress.line(
        f"step {step}  {name} accuracy {scores['accuracy']:.2%}, loss "
        f"{scores['loss']:.4f}, {scores['count']:,} examples"
        + (" (best so far)" if better else "")
    )
    return score


