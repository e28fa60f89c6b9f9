"""One run: everything that its config names, built and checked."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers import config as configs
from jaxformers import models, ranges, tasks, workdirs
from jaxformers.data.engine.loader import Loader, pad_lengths, prefetch
from jaxformers.errors import UserError
from jaxformers.models import pretrained
from jaxformers.registry import call, choose
from jaxformers.tasks import Task
from jaxformers.training import (
  evaluate,
  optim,
  parallel,
  processes,
  report,
  resume,
)
from jaxformers.training import state as states
from jaxformers.training.checkpoint import Restored
from jaxformers.training.losses import OBJECTIVES
from jaxformers.training.steps import train_step
from jaxformers.training.store import Store


@dataclasses.dataclass
class Memo:
  """Memory of a run beside its state; plain JSON, saved with it.

  Attributes:
    window: sums since the last log line.
    best: step and score of the best evaluation so far; {} before the first.
    worse: evaluations since then.
    train_seconds, wall_seconds: times of all processes that worked on the run,
      up to the checkpoint.
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
    store: store of the workdir.
    task, model, state: from the config; state is that of step 0.
    objective: objective of the model, which names the metric.
    higher: whether more of what is selected by is better.
  """

  def __init__(
    self, config: Mapping[str, Any], workdir: Path, *, eval_only: bool = False
  ) -> None:
    self.config = configs.complete(config)
    check_fields(self.config, eval_only=eval_only)
    self.workdir = workdir
    self.store = Store(workdir, self.config["store_seconds"])
    self._began = time.perf_counter()
    self.carried_seconds = 0.0
    c = self.config
    # What is evaluated lies on whatever devices there are.
    self.layout = parallel.layout("" if eval_only else c["mesh"])
    if eval_only:
      resume.check_trained(workdir)
      workdirs.read_config(workdir)
    else:
      _check_batch(c, self.layout.parts)
    resume.check_config(workdir, c)
    self.tx, self.schedule = optim.build(
      c["optimizer"], c["schedule"], c["total_steps"]
    )
    for section in ("model", "reference"):
      models.check(c[section], f"config.{section}")
    self.task = tasks.get(**{"data_dir": c["data_dir"], **c["task"]})
    self.model = _model(c["model"], self.task)
    self.reference = models.size(_model(c["reference"], self.task))
    self.objective = OBJECTIVES[self.model.objective]
    metric = self.objective.metric
    choose("field config.select", c["select"], (metric, "loss"))
    self.higher = c["select"] == metric and self.objective.higher
    create = functools.partial(
      states.create, self.model, self.tx, averaged=c["ema_decay"] > 0
    )
    state = jax.jit(create, static_argnums=0)(c["seed"])
    # A run that is taken up again has left them behind.
    begun = processes.agreed(resume.has_checkpoints(workdir))
    if c["pretrained"] and not eval_only and not begun:
      params = pretrained.parameters(c["pretrained"], state.params)
      average = state.average and jax.tree.map(jnp.copy, params)
      state = state.replace(params=params, average=average)
    self.state = self.layout.place(state)
    self.train_step, self.place = parallel.compile_step(
      c["parallel"],
      functools.partial(
        train_step,
        model=self.model,
        tx=self.tx,
        seed=c["seed"],
        accumulate=c["accumulate"],
        smoothing=c["label_smoothing"],
        ema_decay=c["ema_decay"],
        prepare=self.layout.prepared,
      ),
      self.layout,
      state=self.state,
      donate=True,
    )
    lengths = pad_lengths(self.task.max_len, c["buckets"])
    image = self.task.sizes().get("image")
    self.layout.check_lengths(image[:1] if image else lengths)
    self.evaluate = evaluate.Evaluator(
      self.model, c["parallel"], c["eval_batch_size"], lengths, self.layout
    )
    self.loader = Loader(self.task.splits["train"], lengths, *self.layout.share)
    self.order = self.loader.order(c["batch_size"], c["seed"])

  def begin(self) -> None:
    """Writes the config and the vocabulary.

    Called when everything could be built, and nothing in the workdir is of
    another run.
    """
    if not processes.is_first():
      return
    workdir = self.workdir
    workdir.mkdir(parents=True, exist_ok=True)
    self.store.patiently(
      "config.json", lambda: workdirs.write(workdir, "config.json", self.config)
    )
    self.store.patiently(
      "the vocabulary", lambda: workdirs.write_vocabulary(workdir, self.task)
    )

  def batches(self, start: int) -> Iterator[Any]:
    """The batches of all steps from one on, counted from 0, on their devices.

    They are read and placed ahead, while the device is at work.
    """

    seed = self.config["seed"]

    def make(step: int) -> Any:
      return self.place(self.loader.batch(self.order(step), (seed, step)))

    return prefetch(make, range(start, self.config["total_steps"]))

  def finished_results(self) -> dict[str, Any] | None:
    """Returns the content of `results.json` if this run has ended, or None."""
    return resume.finished_results(
      self.workdir, self.config, self.task.description()
    )

  def wall_seconds(self) -> float:
    """Returns the time of this process and of those before it.

    Of the latter, up to their last checkpoint.
    """
    return self.carried_seconds + time.perf_counter() - self._began

  def results(
    self, scores: Mapping[str, Any], best: Restored, memo: Memo
  ) -> dict[str, Any]:
    """The content of `results.json`.

    Args:
      scores: scores on the test split.
      best: checkpoint that was scored.
      memo: memory of the whole run.
    """
    c, task = self.config, self.task
    size = models.size(self.model)
    return {
      "task": task.name,
      "protocol": task.protocol,
      "selection": task.selection,
      "model": c["model"]["name"],
      "seed": c["seed"],
      "metric": self.objective.metric,
      **{key: value for key, value in scores.items() if key != "count"},
      "examples": scores["count"],
      "best_step": best.step,
      "selection_score": best.score,
      **({} if best.lost is None else {"damaged_best_step": best.lost}),
      "baselines": task.baselines(),
      "parameters": size,
      "parameter_ratio": size / self.reference,
      "metrics_records": len(workdirs.read_metrics(self.workdir)[0]),
      "train_seconds": memo.train_seconds,
      "wall_seconds": self.wall_seconds(),
      "commit": report.commit(),
      "hardware": report.hardware(),
      "versions": report.versions(),
      "data": dict(task.info),
      "task_description": task.description(),
      "max_len": task.max_len,
      "config": c,
    }


def _model(options: Mapping[str, Any], task: Task) -> models.Model:
  return call("config.model", models.build, {**options, **task.sizes()})


def check_fields(config: Mapping[str, Any], *, eval_only: bool = False) -> None:
  """Raises UserError for a field that no run can have, before data are read.

  Args:
    config: plain and complete.
    eval_only: True for a run that has been trained: only the fields that may
      differ from those of its training are checked, so that runs of older
      versions can still be scored.
  """
  if eval_only:
    fields = configs.RESUMABLE_FIELDS
    return ranges.check(
      {k: v for k, v in config.items() if k in fields}, "config"
    )
  c = config
  for field in c:
    choose("config field", field, configs.FIELDS)
  ranges.check(c, "config")
  choose("parallel mode", c["parallel"], parallel.COMPILERS)
  metrics = {objective.metric for objective in OBJECTIVES.values()}
  choose("field config.select", c["select"], sorted(metrics | {"loss"}))
  warmup_steps = c["schedule"].get("warmup_steps", 0)
  if warmup_steps > c["total_steps"]:
    raise UserError(
      f"config.schedule.warmup_steps={warmup_steps} is beyond the end of the "
      f"run, config.total_steps={c['total_steps']}: shorten it, such as by "
      f"--config.schedule.warmup_steps={c['total_steps'] // 10}."
    )
  if c["ema_decay"] and c["model"].get("orthogonal_map") == "matrix":
    raise UserError(
      f"config.ema_decay={c['ema_decay']} with orthogonal_map='matrix': the "
      "average of orthogonal matrices is none. Choose another map, or 0."
    )


def _check_batch(config: Mapping[str, Any], devices: int) -> None:
  accumulate = config["accumulate"]
  what = f"{devices} device(s) in {accumulate} part(s) each"
  size = config["batch_size"]
  parallel.check_batch("batch_size", size, devices * accumulate, what)
