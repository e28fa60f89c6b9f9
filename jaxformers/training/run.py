"""A run: its checked config, its task, its model and its first state.

This module writes no files. A trained run needs no optimiser; `trainer` adds
what training needs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxformers import config as configs
from jaxformers import models, tasks
from jaxformers.config import RunConfig
from jaxformers.data.engine.loader import pad_lengths
from jaxformers.data.images.augment import Augment
from jaxformers.foundations import ranges, requirements, user_code, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call, choose
from jaxformers.models.attention import Attention
from jaxformers.models.bounds import MARGIN_LOSSES, check_bound
from jaxformers.models.config import HEADS, block_of
from jaxformers.models.embedding import Embedding
from jaxformers.models.mixer import POSITION_WEIGHTS
from jaxformers.tasks import Task, arrays
from jaxformers.training import compilers, optim, origin, resume
from jaxformers.training import state as states
from jaxformers.training.checkpoint import Checkpoints
from jaxformers.training.layout import Layout, placed_shapes
from jaxformers.training.losses import LOSSES, Objective


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of one seed, as its config describes it.

  Attributes:
    config: config of the run.
    workdir: absolute path of the folder of the run.
    task: task with its splits.
    model: model that is trained.
    num_reference_params: number of parameters of the Transformer that
      `config.reference` describes.
    layout: devices, and where arrays lie on them.
    tx: optimiser; None for a run that was opened after its training.
    schedule: maps the step, counted from 0, to the learning rate; None without
      an optimiser.
  """

  config: RunConfig
  workdir: Path
  task: Task
  model: models.Model
  num_reference_params: int
  layout: Layout
  tx: optax.GradientTransformation | None = None
  schedule: optax.Schedule | None = None

  @property
  def objective(self) -> Objective:
    """Losses and metric of the model."""
    return LOSSES[self.model.objective]

  @property
  def padded_lengths(self) -> tuple[int, ...]:
    """Lengths that batches are padded to, ascending."""
    c = self.config
    return pad_lengths(self.task.max_len, c.buckets, c.short_length)

  @functools.cached_property
  def selection_split(self) -> Any:
    """Examples that select the checkpoint.

    They are `config.eval_examples` of the validation split, or all of it. The
    draw does not depend on the seed of the run.
    """
    split = self.task.splits["validation"]
    count = self.config.eval_examples
    if not 0 < count < len(split):
      return split
    # A fixed seed draws the same examples in all runs.
    drawn = np.random.default_rng(0).permutation(len(split))[:count]
    return split.select(np.sort(drawn))

  @property
  def selection(self) -> str:
    """Name of `selection_split`, such as "validation, 4,800 of 18,090"."""
    total = len(self.task.splits["validation"])
    count = len(self.selection_split)
    part = "" if count == total else f", {count:,} of {total:,}"
    return self.task.selection + part

  def selection_score(self, scores: Mapping[str, Any]) -> float:
    """Returns the score that selects a checkpoint; higher is better."""
    select, objective = self.config.select, self.objective
    is_higher_better = select == objective.metric and objective.higher
    return scores[select] if is_higher_better else -scores[select]

  def initial_state(self) -> states.TrainState:
    """Returns the state of step 0, before pretrained weights are loaded."""
    return jax.jit(self._create(self.tx), static_argnums=0)(self.config.seed)

  def scored_template(self) -> states.TrainState:
    """Returns the shapes and the placement of a state without an optimiser."""
    shapes = jax.eval_shape(self._create(None), self.config.seed)
    return placed_shapes(shapes, self.layout.state_sharding(shapes))

  def _create(self, tx: optax.GradientTransformation | None) -> Any:
    averaged = self.config.ema_decay > 0
    return functools.partial(states.create, self.model, tx, averaged=averaged)

  def checkpoints(self) -> Checkpoints:
    """Opens the checkpoints of the run; see `Checkpoints`."""
    return Checkpoints(self.workdir, self.task.description(), self.config)


def default_workdir(
  spec: str, loaded: Mapping[str, Any], config: Mapping[str, Any]
) -> Path:
  """Returns the default folder of a run, below runs/.

  The name holds config, model, arguments, protocol and seed, such as
  runs/lra_text-transject-tiny-jaxformers-0. If fields differ from the config
  file, a digest of these fields follows. The same command always gets the same
  folder. A longer run gets that folder too, unless its schedule depends on the
  length of the run.

  Args:
    spec: config and its arguments, as --config takes them.
    loaded: config of `spec`, as its file returns it.
    config: config of the run.
  """
  name, _, arg = spec.partition(":")
  stem = "_".join(Path(name).with_suffix("").parts[-2:])
  stem = stem.removeprefix("configs_").removeprefix("/_")
  # Add the arguments that no other part of the name says.
  pairs = [item.partition("=") for item in arg.split(",") if item]
  typed = [
    value.strip() if key.strip() == "size" else f"{key.strip()}={value.strip()}"
    for key, _, value in pairs
    if key.strip() not in ("model", "protocol", "seed")
  ]
  # The model may be incomplete here: pretrained weights complete it later.
  fields = configs.plain(config)
  protocol = configs.TaskChoice.from_dict(fields["task"]).protocol
  words = [stem, fields["model"].get("name"), *typed, protocol]
  words.append(str(fields["seed"]))
  # Add a digest of the changed fields; a longer run is the same run. The
  # schedule may be the user's, whose module is not imported yet.
  schedule = fields["schedule"].get("name")
  is_fixed = schedule not in optim.SCHEDULES or optim.ends_with_run(schedule)
  same = ("seed", "patience", *(() if is_fixed else ("total_steps",)))
  before, after = (
    {k: v for k, v in configs.plain(fields).items() if k not in same}
    for fields in (loaded, config)
  )
  if changed := configs.differences(before, after):
    words.append(workdirs.digest(changed)[:6])
  return Path("runs", re.sub(r"[^\w.,=+-]", "_", "-".join(filter(None, words))))


def open_run(
  config: Mapping[str, Any],
  workdir: Path,
  task: Task | None = None,
  chosen: Collection[str] | None = None,
) -> Run:
  """Opens a run for training.

  Everything that can be checked without data is checked before the data are
  prepared.

  Args:
    config: config of the run, as `jaxformers.config.base` makes it.
    workdir: absolute path of the folder of the run; need not exist.
    task: task of the caller's own examples; None for the task of the config.
    chosen: paths of the fields that the user has set, such as "model.d_model".
      `config.pretrained` does not replace them. None means all fields.

  Raises:
    UserError: if the config cannot be trained, or if the workdir belongs to a
      run of another config.
  """
  # Read the config, and check all of its fields.
  c = _read_config(config, workdir, chosen)
  check_fields(c)
  requirements.require_logs(c.logs)
  # Check that a batch splits evenly over devices and accumulated parts.
  layout = compilers.layout(c.mesh)
  compilers.check_split(c, layout)
  # Check that the workdir belongs to no run of another config.
  resume.check_workdir(workdir, c)

  def kinds(params: Any) -> Any:
    return model.kinds(params)  # `model` is built below, from the task.

  # Build the optimiser, then open the data and build the model.
  tx, rate = optim.build_optimizer(
    c.optimizer, c.schedule, c.total_steps, kinds
  )
  task, model, num_reference_params = _build(c, task)
  return Run(c, workdir, task, model, num_reference_params, layout, tx, rate)


def open_trained_run(
  workdir: Path,
  config: Mapping[str, Any] | None = None,
  chosen: Collection[str] | None = None,
) -> Run:
  """Opens a run that has been trained, on the devices that are visible.

  Args:
    workdir: absolute path of the folder of the run.
    config: config that the run must have; None to read its `config.json`.
    chosen: see `open_run`.

  Raises:
    UserError: if there is no run; if its `config.json` is damaged, comes from
      another program, or names code that `user_code.trusting` does not cover;
      or if it is a run of another config.
  """
  # Check the config against the run in the workdir, then open the data.
  workdirs.check_trained(workdir)
  saved = workdirs.read_config(workdir)
  if config is None:
    user_code.import_named_by(workdir, saved.get("imports", ""))
    c = RunConfig.from_dict(saved)
  else:
    c = _read_config(config, workdir, chosen)
  check_fields(c)
  resume.check_workdir(workdir, c)
  return Run(c, workdir, *_build(c), compilers.layout())


def first_params(run: Run) -> Any:
  """Returns the parameters that a run began with.

  Raises:
    UserError: if the run began with pretrained weights that have changed since
      or cannot be read.
  """
  # Draw the parameters from the seed.
  initial = run.initial_state().params
  folder = run.config.pretrained
  if not folder:
    return initial
  # Take over the pretrained weights, which must not have changed since.
  section = run.config.model.as_dict()
  params, record = origin.begin_with(folder, initial, section, run.task)
  before = origin.read_record(run.workdir)
  if before and record["sha256"] != before["sha256"]:
    raise UserError(
      f"{folder} holds other weights than those that {run.workdir} began with. "
      "Restore them, or remove --untrained."
    )
  return params


def _read_config(
  config: Mapping[str, Any], workdir: Path, chosen: Collection[str] | None
) -> RunConfig:
  """Returns a config, completed by the pretrained weights of the run."""
  fields = configs.complete(config)
  user_code.import_modules(fields["imports"])
  return RunConfig.from_dict(origin.take_fields(fields, workdir, chosen))


def _build(
  c: RunConfig, task: Task | None = None
) -> tuple[Task, models.Model, int]:
  """Opens the data of a checked config, and builds its models.

  Returns:
    The task, the model, and the number of parameters of the reference.
  """
  options = c.task_options
  if task is None and c.task.name == arrays.NAME:
    raise UserError(
      "The examples of this run were given in Python, and are not stored: "
      "call jaxformers.train with the same examples, or jaxformers.load for "
      "the model."
    )
  # Open the task, or adopt the one of the caller.
  if task is None:
    task = tasks.get(c.task.name, **options)
  else:
    statistics = {k: options[k] for k in tasks.STATISTICS if k in options}
    task = tasks.normalise(task, **statistics)
  # Build the model and the reference at the sizes of the task.
  model, reference = (
    call("config.model", models.build, {**vars(section), **task.sizes()})
    for section in (c.model, c.reference)
  )
  # Check the fields that depend on the model or on the data.
  _check_short(c, task)
  check_bound(model, c.margin_tokens)
  metric = LOSSES[model.objective].metric
  choose("field config.select", c.select, (metric, "loss"))
  if c.eval_examples and not hasattr(task.splits["validation"], "select"):
    raise UserError(
      f"eval_examples={c.eval_examples} does not apply to language modelling, "
      "which evaluates windows of one text. Set task.eval_windows instead."
    )
  return task, model, models.size(reference)


def _check_short(c: RunConfig, task: Task) -> None:
  """Raises UserError for fields of the first steps that do not fit the task."""
  fields = (
    f"config.short_steps={c.short_steps} and config.short_length="
    f"{c.short_length}"
  )
  if task.curriculum:
    names = ", ".join(task.curriculum)
    if c.short_length or c.short_steps < len(task.curriculum):
      raise UserError(
        f"{fields}: the first steps of this task read {names}. Give at least "
        f"{len(task.curriculum)} short_steps, and no short_length."
      )
  elif c.short_steps and not c.short_length:
    raise UserError(
      f"{fields}: this task has no splits of easier examples. Give the "
      "short_length of the examples of the first steps, or no short_steps."
    )


def check_fields(c: RunConfig) -> None:
  """Raises UserError for an invalid config, before any data are read.

  Preparing data may take long, so this also checks the names and ranges of the
  options of models and tasks.
  """
  # Check the options of the task and of both models.
  tasks.check_ranges(c.task.name, c.task.options, "config.task")
  for name, section in (("model", c.model), ("reference", c.reference)):
    models.check_names(vars(section), f"config.{name}")
  _check_test_lengths(c)
  # Check the fields that name a registered choice.
  choose("parallel mode", c.parallel, compilers.COMPILERS)
  metrics = {objective.metric for objective in LOSSES.values()}
  choose("field config.select", c.select, sorted(metrics | {"loss"}))
  optim.check_options(c.optimizer, c.schedule)
  # Check the fields that depend on each other.
  if c.program and (c.parallel != "jit" or c.imports):
    raise UserError(
      f"config.program={c.program!r} needs config.parallel='jit', not "
      f"{c.parallel!r}, and no config.imports, whose changes it would not see: "
      "remove one of the two."
    )
  choose("field config.margin_loss", c.margin_loss, MARGIN_LOSSES)
  if c.margin_loss != MARGIN_LOSSES[0] and not c.margin_tokens:
    raise UserError(
      f"config.margin_loss={c.margin_loss!r} is a loss for certified training, "
      "but config.margin_tokens=0: give a number of tokens, such as 4."
    )
  if c.margin_weight != RunConfig.margin_weight and not c.margin_tokens:
    raise UserError(
      f"config.margin_weight={c.margin_weight:g} weighs a loss for certified "
      "training, but config.margin_tokens=0: give a number of tokens."
    )
  if c.packing and c.margin_tokens:
    raise UserError(
      f"config.packing=True has no certified training, but margin_tokens="
      f"{c.margin_tokens}: remove one of the two."
    )
  if c.packing and c.program:
    raise UserError(
      f"config.packing=True has no compiled program, but config.program="
      f"{c.program!r}: remove one of the two."
    )
  if c.short_length and not c.short_steps:
    raise UserError(
      f"config.short_length={c.short_length} and config.short_steps=0: give "
      "both, or none."
    )
  if c.short_steps >= c.total_steps:
    raise UserError(
      f"config.short_steps={c.short_steps} leaves no steps of "
      f"config.total_steps={c.total_steps} for the whole training split: give "
      "fewer."
    )
  warmup_steps = c.schedule.warmup_steps
  if warmup_steps > c.total_steps:
    raise UserError(
      f"config.schedule.warmup_steps={warmup_steps} is beyond the end of the "
      f"run, config.total_steps={c.total_steps}: shorten it, such as by "
      f"--config.schedule.warmup_steps={c.total_steps // 10}."
    )
  if c.ema_decay and c.model.orthogonal_map == "matrix":
    raise UserError(
      f"config.ema_decay={c.ema_decay} cannot be combined with "
      "config.model.orthogonal_map='matrix', because the average of orthogonal "
      "matrices is not orthogonal: choose another map, or set ema_decay=0."
    )


def _check_test_lengths(c: RunConfig) -> None:
  """Raises UserError for a test length for which a model has no weights."""
  model = models.MODELS.get(c.model.name)
  mixer = model.mixer if model else ""
  has_weights = mixer in POSITION_WEIGHTS
  is_learned = c.model.positions == "learned"
  if not (has_weights or is_learned) or c.task.name not in tasks.TASKS:
    return
  options = c.task.options
  parameters = inspect.signature(tasks.TASKS[c.task.name]).parameters
  if not {"length", "test_lengths"} <= parameters.keys():
    return
  tested = [*(options.get("test_lengths") or ())]
  tested.append(options.get("test_max_length") or 0)
  trained = options.get("length") or parameters["length"].default
  if max(tested) > trained:
    if is_learned:
      kind = "config.model.positions='learned' has no trained positions there"
      remedy = "set --config.model.positions=none (or sinusoid)"
    else:
      kind = f"the mixer {mixer!r} has no trained weights there"
      remedy = "choose another model, or shorter --config.task.test_lengths"
    raise UserError(
      f"config.task has test sequences of {max(tested)} tokens, above the "
      f"{trained} tokens of training, and {kind}: {remedy}, or a greater "
      "--config.task.length."
    )


def find_range(config: Mapping[str, Any], path: str) -> ranges.Range | None:
  """Returns the range of a field of a config, or None if it has no range.

  Args:
    config: config that names its model, task, optimiser and schedule.
    path: path of the field, such as "model.mixer.num_heads" or "batch_size".
  """
  *sections, name = path.split(".")
  owner = _owner(config, sections)
  return None if owner is None else ranges.of(owner).get(name)


def _owner(config: Mapping[str, Any], sections: list[str]) -> Any:
  """Returns the function or class that defines the options of a section."""
  # Fields of the run itself.
  if not sections:
    return RunConfig
  # Options of a model, and of its parts.
  section, *inner = sections
  name = config.get(section, {}).get("name", "")
  if section in ("model", "reference"):
    heads = types.SimpleNamespace(owners=(*HEADS.values(),))
    owners: dict[str, Any] = {
      "": configs.ModelFields,
      "mixer_defaults": Attention,
      "embedding": Embedding,
      "head": heads,
    }
    if name in models.MODELS:
      variant = models.MODELS[name]
      coupled = config[section].get("coupled", False)
      owners["block"] = models.BLOCKS[block_of(variant, coupled=coupled)]
      if variant.mixer:
        owners["mixer"] = models.MIXERS[variant.mixer]
    return owners.get(".".join(inner))
  # Options of a task, and of its augmentation.
  if section == "task":
    registered = (tasks.TASKS[name],) if name in tasks.TASKS else ()
    shared = (tasks.reconstruct, tasks.normalise)
    of_task = types.SimpleNamespace(owners=(*registered, *shared))
    return {(): of_task, ("augment",): Augment}.get((*inner,))
  # Options of the optimiser, and of its groups of parameters.
  if section == "optimizer":
    registered = (optim.OPTIMIZERS[name],) if name in optim.OPTIMIZERS else ()
    of_all = types.SimpleNamespace(owners=(*registered, optim.SharedOptions))
    is_group = len(inner) == 2 and inner[0] == "groups"
    return optim.Group if is_group else None if inner else of_all
  # Options of the schedule.
  is_schedule = section == "schedule" and name in optim.SCHEDULES
  return optim.SCHEDULES[name] if is_schedule and not inner else None
