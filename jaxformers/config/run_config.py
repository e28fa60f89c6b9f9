"""The config of a run: typed, frozen, and checked when it is made.

A config file returns an `ml_collections.ConfigDict`, whose fields a command may
set. `RunConfig.from_dict` reads it, once; all that follows has its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypedDict, get_type_hints

from ml_collections import ConfigDict

from jaxformers.config.plain import flatten, plain
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Count,
  Deviation,
  Fraction,
  Interval,
  OptionalSize,
  PositiveCount,
  Share,
  SmallCount,
  Width,
)
from jaxformers.foundations.registry import call, choose

# Fields that turn on logs besides `metrics.jsonl`.
LOGS = ("tensorboard", "wandb")
# Fields that may differ when a run resumes, because they change rounding at
# most, or (`accumulate`) what is drawn for a part of a batch. Other data behind
# a path would change more: a checkpoint also keeps a digest of its data.
RESUMABLE_FIELDS = (
  "accumulate",
  "data_dir",
  "imports",
  "mesh",
  "task.archive",
  "task.vocabulary",
  "tensorboard",
  "wandb",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """Something registered that a config chooses, such as an optimiser.

  Attributes:
    name: name in its registry.
    options: its options; those that are left out have their defaults.
  """

  name: str = ""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @classmethod
  def from_dict(cls, section: Mapping[str, Any]) -> Self:
    """Returns the choice of a section of a config."""
    options = {k: v for k, v in section.items() if k != "name"}
    return cls(name=section.get("name", ""), options=options)

  def as_dict(self) -> dict[str, Any]:
    """Returns the section of a config, as `from_dict` takes it."""
    return {"name": self.name, **self.options}


class TaskChoice(Choice):
  """A task, in `tasks.TASKS`."""

  @property
  def protocol(self) -> str:
    """Protocol of the task; "" for its default."""
    return str(self.options.get("protocol") or "")


class ScheduleChoice(Choice):
  """A schedule of the learning rate, in `optim.SCHEDULES`."""

  @property
  def warmup_steps(self) -> int:
    """Steps of the warm-up; 0 for schedules without one."""
    return int(self.options.get("warmup_steps", 0))


@dataclasses.dataclass(frozen=True)
class ModelFields:
  """Section `config.model`: what defines a model besides the sizes of its task.

  Attributes:
    name: in `models.MODELS`.
    d_model: width d.
    num_layers: number of layers of the encoder.
    patch_size: side of the patches that images are cut to; 0 for sequences.
    pool, pool_norm, head_dim, head_layers, head_activation, head_init_std,
      head_dropout_rate, interaction: see `heads.ClassifierHead`; for
      classification. The pool "cls" puts a token in front, and "distilled"
      two, for segmentation too.
    positions: "sinusoid", "sinusoid_2d", "learned" or "none".
    dropout_rate: dropout after the embedding.
    dtype: "float32" or "bfloat16", the compute type; parameters are float32.
    orthogonal_map: in `orthogonal.MAPS`: "cayley", "expm", "householder", or
      "matrix", for which the optimiser keeps the matrices orthogonal.
    memory: what the backward pass reads: "stored" activations; the
      layers' inputs alone, "recomputed"; or for injective layers the encoder's
      output alone, "reversible", whose memory does not grow with num_layers.
      See `Encoder`.
    coupled: True for layers of the block `coupled` around the mixer of the
      name, which makes any mixer injective.
    mixer: options of the mixer.
    mixer_defaults: values that a recipe has for every mixer: attributes of
      `Attention`, such as num_heads and dropout_rate. They hold where the mixer
      has the option, sets no default of its own, and `mixer` says nothing.
    block: options of the block.
    embedding: `cutoffs`, `div_value`, `scale`, `init_std`, `norm_epsilon` of
      `Embedding`.
    head: for a language model `tied` and `dropout_rate`, see `LanguageModel`;
      for the decoder of a segmenter `num_layers` (2), `dropout_rate` (0.1, on
      the branches) and `mixer_defaults` that differ from the encoder's.
  """

  name: str
  d_model: Width
  num_layers: SmallCount
  patch_size: Annotated[int, Interval("[0, 2^16]")] = 0
  pool: str = "mean"
  pool_norm: str = ""
  head_dim: OptionalSize = 0
  head_layers: Annotated[int, Interval("[1, 20]")] = 1
  head_activation: str = "relu"
  head_init_std: Deviation = 0.0
  head_dropout_rate: Fraction = 0.0
  interaction: str = ""
  positions: str = "sinusoid"
  dropout_rate: Fraction = 0.0
  dtype: str = "float32"
  orthogonal_map: str = "cayley"
  memory: str = "stored"
  coupled: bool = False
  mixer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  mixer_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  block: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  embedding: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  head: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def as_dict(self) -> dict[str, Any]:
    """Returns the section of a config, with all of its fields."""
    return plain(vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything that defines a run.

  `jaxformers.config.base` makes a config with these fields, and `from_dict`
  reads it. `--help` shows the lines of help below.

  Raises:
    UserError: for a field of another type or out of its range.
  """

  # Start of the run, and the sections of its data, model and training.
  seed: Annotated[
    Count, "seed of parameters, order of examples and dropout"
  ] = 0
  imports: Annotated[
    str, "modules of your own code to import first, separated by commas"
  ] = ""
  pretrained: Annotated[
    str, "run, exported model or folder of Hugging Face to start from"
  ] = ""
  task: Annotated[TaskChoice, "name, protocol and options of the task"]
  model: Annotated[ModelFields, "name and options of jaxformers.models.build"]
  reference: Annotated[
    ModelFields, "Transformer for the comparison of parameters"
  ]
  optimizer: Annotated[Choice, "name and options of the optimiser"]
  schedule: Annotated[ScheduleChoice, "name and options of the learning rate"]
  # Batches, loss and average of a train step; batches of an evaluation.
  batch_size: Annotated[
    PositiveCount, "examples per step, over all devices"
  ] = 32
  accumulate: Annotated[
    Count, "microbatches per batch, to save memory; 0: as many as are fastest"
  ] = 0
  label_smoothing: Annotated[
    Fraction, "share of the target spread over all classes"
  ] = 0.0
  margin_tokens: Annotated[
    Count,
    "replaced tokens that the loss is robust to, by the certificate; 0: none",
  ] = 0
  margin_weight: Annotated[
    Share, "share of that loss; the rest is without them"
  ] = 1.0
  ema_decay: Annotated[
    Fraction, "decay of the average of parameters that is scored; 0: none"
  ] = 0.0
  eval_batch_size: Annotated[PositiveCount, "examples per evaluation batch"] = (
    32
  )
  eval_examples: Annotated[
    Count, "examples of the selection split that are scored; 0: all"
  ] = 0
  buckets: Annotated[
    PositiveCount, "number of lengths that batches are padded to"
  ] = 1
  # Length of the run, and when it logs, evaluates and saves.
  total_steps: Annotated[PositiveCount, "step at which the run ends"] = 1000
  log_steps: Annotated[PositiveCount, "steps between two log lines"] = 50
  eval_steps: Annotated[PositiveCount, "steps between two evaluations"] = 500
  checkpoint_steps: Annotated[
    PositiveCount, "steps between two checkpoints"
  ] = 500
  select: Annotated[str, "score that selects the best checkpoint"] = "accuracy"
  patience: Annotated[
    Count, "evaluations without improvement before the run stops; 0: never"
  ] = 0
  # Devices, the folder of data, and further logs.
  parallel: Annotated[str, "jit over a mesh, or pmap"] = "jit"
  mesh: Annotated[
    str, "devices by axis, data:2,sequence:4; empty: all for data"
  ] = ""
  data_dir: Annotated[
    str, "folder of data; empty: $JAXFORMERS_DATA_DIR or ~/.cache/jaxformers"
  ] = ""
  tensorboard: Annotated[bool, "also write TensorBoard files"] = False
  wandb: Annotated[bool, "also log to Weights & Biases"] = False

  def __post_init__(self) -> None:
    ranges.check(RunConfig, vars(self), "config")
    for name, kind in SECTIONS.items():
      section = getattr(self, name)
      if not isinstance(section, kind):
        raise UserError(
          f"config.{name}={section!r:.60} is not of type {kind.__name__}: use "
          "RunConfig.from_dict for plain fields."
        )
      ranges.Range(str).check(f"config.{name}.name", section.name)
      if kind is ModelFields:
        ranges.check(ModelFields, vars(section), f"config.{name}")
    ranges.check(_Schedule, self.schedule.options, "config.schedule")

  @classmethod
  def from_dict(cls, config: Mapping[str, Any]) -> Self:
    """Returns the config of a file, a command or a `config.json`.

    Args:
      config: values of fields, and sections of fields, as `base` or `as_dict`
        returns them. Fields that are left out have their defaults.

    Raises:
      UserError: for an unknown field, or one of another type or out of its
        range.
    """
    fields = complete(config)
    for name in fields:
      choose("config field", name, FIELDS)
    for name, kind in SECTIONS.items():
      ranges.Range(dict).check(f"config.{name}", fields[name])
      if kind is ModelFields:
        fields[name] = call(f"config.{name}", ModelFields, fields[name])
      else:
        fields[name] = kind.from_dict(fields[name])
    return cls(**fields)

  def without_defaults(self) -> dict[str, Any]:
    """Returns `as_dict` without fields of models that have their default."""
    fields = self.as_dict()
    defaults = ModelFields("", 0, 0).as_dict()
    for name in ("model", "reference"):
      fields[name] = {k: v for k, v in fields[name].items() if v != defaults[k]}
    return fields

  @property
  def logs(self) -> tuple[str, ...]:
    """Those of `LOGS` that are turned on."""
    return tuple(name for name in LOGS if getattr(self, name))

  @property
  def task_options(self) -> dict[str, Any]:
    """Options of the task, the folder of data among them, for `tasks.get`."""
    return {"data_dir": self.data_dir, **self.task.options}

  def as_dict(self) -> dict[str, Any]:
    """Returns the config as JSON has it, with all of its fields."""
    fields = dict(vars(self))
    return plain(fields | {name: fields[name].as_dict() for name in SECTIONS})


class _Schedule(TypedDict, total=False):
  """Options of schedules that a run reads."""

  warmup_steps: Count


SECTIONS: Mapping[str, Any] = {
  "task": TaskChoice,
  "model": ModelFields,
  "reference": ModelFields,
  "optimizer": Choice,
  "schedule": ScheduleChoice,
}
# Sections of a config that does not list them.
DEFAULT_SECTIONS: Mapping[str, Any] = {
  "task": {},
  "model": {},
  "reference": {},
  "optimizer": {"name": "adam"},
  "schedule": {"name": "constant", "learning_rate": 1e-3},
}
# Lines of help by field.
FIELDS = {
  name: next(text for text in hint.__metadata__ if isinstance(text, str))
  for name, hint in get_type_hints(RunConfig, include_extras=True).items()
}


def base(**fields: Any) -> ConfigDict:
  """Returns a config of the `FIELDS` of every run, with the given values.

  Raises:
    UserError: for an unknown field.
  """
  for name in fields:
    choose("config field", name, FIELDS)
  defaults = {
    field.name: DEFAULT_SECTIONS.get(field.name, field.default)
    for field in dataclasses.fields(RunConfig)
  }
  return ConfigDict(defaults | fields)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a plain config with defaults for fields that it does not have.

  A section of the config replaces the whole default of that section.
  """
  return plain(base()) | plain(config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns a line "key: old -> new" for each field in which configs differ.

  `RESUMABLE_FIELDS` are not compared.

  Args:
    old, new: configs as JSON has them.
  """
  # An empty section is as one that is left out.
  before, after = (
    {key: value for key, value in flatten(c).items() if value != {}}
    for c in (old, new)
  )
  absent = object()  # Differs from every value, None included.
  return [
    f"{key}: {before.get(key, 'absent')!r} -> {after.get(key, 'absent')!r}"
    for key in sorted(before.keys() | after.keys())
    if key not in RESUMABLE_FIELDS
    and before.get(key, absent) != after.get(key, absent)
  ]
