"""The config of a run: typed, frozen, and checked when it is created.

A config file returns an `ml_collections.ConfigDict`, whose fields a command can
set. `RunConfig.from_dict` converts it once; all later code reads the result.
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

# Fields that turn on further logs, besides `metrics.jsonl`.
LOGS = ("tensorboard", "wandb")
# Fields that may differ when a run resumes. They change at most rounding, or
# (`accumulate`) what is drawn for a part of a batch. Other data at a path would
# change more, so a checkpoint also keeps a digest of its data.
RESUMABLE_FIELDS = (
  "accumulate",
  "data_dir",
  "imports",
  "mesh",
  "program",
  "task.archive",
  "task.vocabulary",
  "tensorboard",
  "wandb",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A registered object that a config chooses, such as an optimiser.

  Attributes:
    name: name in its registry.
    options: options of the object; missing options have their defaults.
  """

  name: str = ""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @classmethod
  def from_dict(cls, section: Mapping[str, Any]) -> Self:
    """Returns the choice that a section of a config describes."""
    options = {k: v for k, v in section.items() if k != "name"}
    return cls(name=section.get("name", ""), options=options)

  def as_dict(self) -> dict[str, Any]:
    """Returns the section of the config, in the form of `from_dict`."""
    return {"name": self.name, **self.options}


class TaskChoice(Choice):
  """A task in `tasks.TASKS`."""

  @property
  def protocol(self) -> str:
    """Protocol of the task; "" for its default."""
    return str(self.options.get("protocol") or "")


class ScheduleChoice(Choice):
  """A learning-rate schedule in `optim.SCHEDULES`."""

  @property
  def warmup_steps(self) -> int:
    """Number of warm-up steps; 0 for schedules without a warm-up."""
    return int(self.options.get("warmup_steps", 0))


@dataclasses.dataclass(frozen=True)
class ModelFields:
  """Section `config.model`: all that defines a model, except task sizes.

  Attributes:
    name: name in `models.MODELS`.
    d_model: width d, the hidden size.
    num_layers: number of layers of the encoder.
    patch_size: side of the patches that images are cut to; 0 for sequences.
    pool, pool_norm, head_dim, head_layers, head_activation, head_init_std,
      head_dropout_rate, interaction: options of classifiers; see
      `heads.ClassifierHead`. The pool "cls" prepends one token and "distilled"
      two, also for segmentation.
    positions: kind of positions, "sinusoid", "sinusoid_2d", "learned" or
      "none".
    dropout_rate: dropout after the embedding.
    dtype: compute type, "float32" or "bfloat16"; parameters are float32.
    orthogonal_map: name in `orthogonal.MAPS`: "bro", "cayley", "expm",
      "householder", or "matrix", for which the optimiser keeps the matrices
      orthogonal.
    memory: what is stored for the backward pass: "stored" keeps all
      activations; "recomputed" keeps only the inputs of the layers;
      "reversible", for injective layers, keeps only the output of the encoder,
      so that memory does not grow with num_layers. See `Encoder`.
    coupled: True to put the mixer of the name into layers of the block
      `coupled`, which makes any mixer injective.
    mixer: options of the mixer.
    mixer_defaults: default values of a recipe for every mixer: attributes of
      `Attention`, such as num_heads and dropout_rate. A value applies if the
      mixer has the option, sets no default for it, and `mixer` does not set it.
    block: options of the block.
    embedding: `cutoffs`, `div_value`, `scale`, `init_std`, `norm_epsilon` of
      `Embedding`.
    head: options of the head. For a language model `tied` and `dropout_rate`,
      see `LanguageModel`; for the decoder of a segmenter `num_layers` (2),
      `dropout_rate` (0.1, on the branches) and `mixer_defaults` that differ
      from the encoder's.
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
    """Returns the section of a config with all of its fields."""
    return plain(vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything that defines a run.

  `jaxformers.config.base` makes a config with these fields, and `from_dict`
  reads it. `--help` shows the help texts below.

  Raises:
    UserError: for a value of another type, or out of its range.

  Example:
    >>> from jaxformers import config
    >>> fields = config.load("lra/listops:size=tiny,model=s5")
    >>> run_config = RunConfig.from_dict(fields)
    >>> run_config.model.name, run_config.total_steps
    ('s5', 1500)
  """

  # Start of the run, and the sections of its data, model and training.
  seed: Annotated[
    Count, "seed of parameters, order of examples and dropout"
  ] = 0
  imports: Annotated[
    str, "modules of your own code to import first, separated by commas"
  ] = ""
  pretrained: Annotated[
    str, "run, exported model or Hugging Face folder to start from"
  ] = ""
  task: Annotated[TaskChoice, "name, protocol and options of the task"]
  model: Annotated[ModelFields, "name and options of jaxformers.models.build"]
  reference: Annotated[
    ModelFields, "Transformer to compare numbers of parameters with"
  ]
  optimizer: Annotated[Choice, "name and options of the optimiser"]
  schedule: Annotated[ScheduleChoice, "name and options of the learning rate"]
  # Batches, loss and average of a train step; batches of an evaluation.
  batch_size: Annotated[
    PositiveCount, "examples per step, over all devices"
  ] = 32
  accumulate: Annotated[
    Count, "parts per batch (gradient accumulation); 0: as many as are fastest"
  ] = 0
  label_smoothing: Annotated[
    Fraction, "share of the target spread over all classes"
  ] = 0.0
  margin_tokens: Annotated[
    Count,
    "number of replaced tokens to certify a margin against; 0 turns it off",
  ] = 0
  margin_weight: Annotated[
    Share, "weight of the certified loss; the rest is plain cross-entropy"
  ] = 1.0
  margin_loss: Annotated[
    str, "form of the certified loss: fixed, emma or annealed"
  ] = "fixed"
  ema_decay: Annotated[
    Fraction, "decay of the parameter average that is evaluated; 0: no average"
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
  short_steps: Annotated[
    Count, "number of first steps that read only short or easy examples"
  ] = 0
  short_length: Annotated[
    Count, "greatest length of an example in the first short_steps steps"
  ] = 0
  packing: Annotated[
    bool, "train on rows of several examples; buckets then pad evaluations only"
  ] = False
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
    str, "devices per axis, as data:2,sequence:4; empty: all for data"
  ] = ""
  program: Annotated[
    str, "train step from jaxformers compile --out; empty: compile it"
  ] = ""
  data_dir: Annotated[
    str, "folder of data; empty: $JAXFORMERS_DATA_DIR or ~/.cache/jaxformers"
  ] = ""
  tensorboard: Annotated[bool, "also write TensorBoard files"] = False
  wandb: Annotated[bool, "also log to Weights & Biases"] = False

  def __post_init__(self) -> None:
    # Check the types and ranges of all fields.
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
    """Returns the typed config of a file, a command or a `config.json`.

    Args:
      config: values and sections of fields, as `base` or `as_dict` returns
        them. Missing fields have their defaults.

    Raises:
      UserError: for an unknown field, or for a value of another type or out of
        its range.
    """
    fields = complete(config)
    # Check the names of the fields.
    for name in fields:
      choose("config field", name, FIELDS)
    # Convert the sections.
    for name, kind in SECTIONS.items():
      ranges.Range(dict).check(f"config.{name}", fields[name])
      if kind is ModelFields:
        fields[name] = call(f"config.{name}", ModelFields, fields[name])
      else:
        fields[name] = kind.from_dict(fields[name])
    return cls(**fields)

  def without_defaults(self) -> dict[str, Any]:
    """Returns `as_dict` without model fields that have their defaults."""
    fields = self.as_dict()
    defaults = ModelFields("", 0, 0).as_dict()
    for name in ("model", "reference"):
      fields[name] = {k: v for k, v in fields[name].items() if v != defaults[k]}
    return fields

  @property
  def logs(self) -> tuple[str, ...]:
    """Names in `LOGS` that are turned on."""
    return tuple(name for name in LOGS if getattr(self, name))

  @property
  def task_options(self) -> dict[str, Any]:
    """Options of the task, including the data folder, for `tasks.get`."""
    return {"data_dir": self.data_dir, **self.task.options}

  def as_dict(self) -> dict[str, Any]:
    """Returns the config as plain JSON, with all of its fields."""
    fields = dict(vars(self))
    return plain(fields | {name: fields[name].as_dict() for name in SECTIONS})


class _Schedule(TypedDict, total=False):
  """Options of schedules that a run itself reads."""

  warmup_steps: Count


SECTIONS: Mapping[str, Any] = {
  "task": TaskChoice,
  "model": ModelFields,
  "reference": ModelFields,
  "optimizer": Choice,
  "schedule": ScheduleChoice,
}
# Values of sections that a config does not list.
DEFAULT_SECTIONS: Mapping[str, Any] = {
  "task": {},
  "model": {},
  "reference": {},
  "optimizer": {"name": "adam"},
  "schedule": {"name": "constant", "learning_rate": 1e-3},
}
# Help texts by field.
FIELDS = {
  name: next(text for text in hint.__metadata__ if isinstance(text, str))
  for name, hint in get_type_hints(RunConfig, include_extras=True).items()
}


def base(**fields: Any) -> ConfigDict:
  """Returns a config of all `FIELDS`, with the given values set.

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
  """Returns a plain config with defaults for the fields that are missing.

  A section of the config replaces the whole default of that section.
  """
  return plain(base()) | plain(config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns a line "key: old -> new" for each field that differs.

  `RESUMABLE_FIELDS` are not compared.

  Args:
    old, new: configs as plain JSON.
  """
  # An empty section counts as a missing one.
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
