"""The configuration of a model: typed, frozen, and checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from flax.core import FrozenDict

from jaxformers import orthogonal
from jaxformers.config import ModelFields
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Count,
  Fraction,
  Interval,
  Length,
  SmallCount,
  Width,
)
from jaxformers.foundations.registry import check_options, choose, unknown
from jaxformers.models import attention, heads
from jaxformers.models.activations import ACTIVATIONS
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.invertible import LOOPED
from jaxformers.models.embedding import (
  POSITIONS,
  Embedding,
  check_width,
  num_patches,
)
from jaxformers.models.mixer import MIXERS
from jaxformers.models.norm import NORMS
from jaxformers.models.variants import MODELS, Variant

DTYPES = ("float32", "bfloat16")
# What the backward pass reads: see `ModelConfig.memory`.
MEMORY_MODES = ("stored", *LOOPED)
# Learned tokens in front of the input, by the pool that reads them.
FRONT_TOKENS = {"cls": 1, "distilled": 2}
SECTIONS = ("mixer", "mixer_defaults", "block", "embedding", "head")
# Options that classifiers alone have, at their defaults.
PLAIN_HEAD = {
  "pool_norm": "",
  "head_dim": 0,
  "head_layers": 1,
  "head_init_std": 0.0,
  "head_dropout_rate": 0.0,
}
# Options whose values are names: what they are called, and the choices.
CHOICES = {
  "orthogonal_map": ("orthogonal map", orthogonal.MAPS),
  "memory": ("memory mode", MEMORY_MODES),
  "dtype": ("dtype", DTYPES),
  "pool": ("pool", heads.POOLS),
  "positions": ("positions", POSITIONS),
  "pool_norm": ("norm of the pooled vector", ("", *NORMS)),
  "head_activation": ("activation", ACTIVATIONS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelFields):
  """Everything that defines a model: `config.model` and sizes of the task.

  A model keeps its config as `model.config`; another dtype or memory mode is
  `dataclasses.replace(model.config, dtype="bfloat16")`.

  Attributes:
    vocab_size: number of token ids, padding (0) included; 0 if tokens are real
      numbers or patches.
    max_len: greatest number of tokens, without meaning for images.
    num_classes: number of logits, at least 1; 0 for language models and models
      of values, for which it has no meaning.
    objective: "classification", "language_model", "segmentation", "spans",
      "sentences", or one of `Reconstruction`.
    image: (height, width, channels), or () for sequences.
    num_inputs: 2 for pairs.
    separator: id that ends the first part of a sequence of two; 0 if sequences
      have one part.
    padded_len: divisor of the pool "padded_mean", 0 for max_len.

  Raises:
    UserError: for an unknown name or option, naming the choices; for an option
      out of its range; for options that do not go together.
  """

  vocab_size: Count
  max_len: Length
  num_classes: Count = 0
  objective: str = "classification"
  image: tuple[Width, ...] = ()
  num_inputs: Annotated[int, Interval("[1, 2]")] = 1
  separator: Count = 0
  padded_len: Length = 0

  def __post_init__(self) -> None:
    # Check the types before values are converted; None is an empty section.
    options = {field: getattr(self, field) for field in FIELDS}
    for section in SECTIONS:
      options[section] = {} if options[section] is None else options[section]
    ranges.check(ModelConfig, options)
    object.__setattr__(self, "image", tuple(self.image))
    for section in SECTIONS:
      section_options = options[section]
      object.__setattr__(self, section, FrozenDict(_hashable(section_options)))
    self._check()

  @property
  def variant(self) -> Variant:
    """Mixer and block that the name stands for."""
    return MODELS[self.name]

  @property
  def block_name(self) -> str:
    """Name of the block of every layer, in `BLOCKS`."""
    return block_of(self.variant, coupled=self.coupled)

  @property
  def predicts_next(self) -> bool:
    """True if the objective is to predict what follows a token."""
    return self.objective in NEXT

  @property
  def is_causal(self) -> bool:
    """True if the mixer reads earlier tokens only, whatever the objective."""
    options = self.mixer_options() if self.variant.mixer else {}
    return is_causal(self.variant, options)

  @property
  def has_values(self) -> bool:
    """True if the model predicts real numbers."""
    return self.objective in ("masked_values", "next_values")

  @property
  def masks_values(self) -> bool:
    """True if some of the inputs are NaN, for masked numbers."""
    return self.real and self.objective in MASKED

  @property
  def cls(self) -> int:
    """Number of learned tokens that the encoder puts in front."""
    return FRONT_TOKENS.get(self.pool, 0)

  @property
  def real(self) -> bool:
    """True if tokens are real numbers."""
    return self.vocab_size == 0 and not self.image

  @property
  def num_tokens(self) -> int:
    """Greatest number of tokens or patches, without a token in front."""
    if self.image:
      return num_patches(self.image, self.patch_size)
    return self.max_len

  @property
  def encoder_len(self) -> int:
    """Greatest number of tokens in the encoder, those in front included."""
    return self.num_tokens + self.cls

  def mixer_options(self, *differing: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mixer's options, with the defaults of variant and recipe.

    Args:
      *differing: defaults that replace those of `mixer_defaults`.
    """
    shared = dict(self.mixer_defaults)
    for defaults in differing:
      shared |= defaults
    options = complete_mixer(self.variant, self.mixer, shared)
    return {"causal": True} | options if self.predicts_next else options

  def _check(self) -> None:
    check_names({field: getattr(self, field) for field in FIELDS}, path="")
    compares = self.objective == "sentences"
    if compares and self.interaction:
      raise UserError(
        f"interaction={self.interaction!r} is of classifiers, and sentences "
        "are compared by their cosine: leave it empty."
      )
    heads.check(
      self.pool,
      self.head_activation,
      self.interaction,
      1 if compares else self.num_inputs,
      (self.head_dim, self.head_layers),
    )
    self._check_objective()
    self._check_pool()
    head = HEADS.get(self.objective, dict)
    for option in self.head:
      choose("option of head", option, ranges.of(head))
    if self.predicts_next:
      self._check_causal()
    elif self.objective in MASKED:
      self._check_bidirectional()

  def _check_causal(self) -> None:
    """Raises UserError for a mixer that sees what the model predicts."""
    variant, options = self.variant, self.mixer_options()
    kind = f"mixer {variant.mixer!r}"
    if not variant.mixer:
      raise UserError(
        f"The model {self.name!r} has no causal form: choose a model with one, "
        "or task.objective=masked."
      )
    make = MIXERS[variant.mixer]
    check_section("mixer", kind, make, options, variant.fixed)
    if not options["causal"]:
      raise UserError(
        "A model that predicts the next token sees what it predicts with "
        "mixer.causal=False: leave the option out."
      )
    if self.block.get("norm_type") == "batch":
      raise UserError(
        'block.norm_type="batch" shows later tokens to earlier ones in '
        "training, by their mean: choose another norm to predict what follows."
      )

  def _check_bidirectional(self) -> None:
    """Raises UserError for a mixer that sees one side of a masked token."""
    if self.is_causal:
      raise UserError(
        f"The mixer {self.variant.mixer!r} reads earlier tokens alone, and "
        "masked tokens are predicted from both sides: choose "
        "task.objective=causal, or mixer.causal=False where the mixer has it."
      )

  def _check_objective(self) -> None:
    """Raises UserError for inputs and options that the objective has not."""
    choose("objective", self.objective, OBJECTIVES)
    if self.patch_size and not self.image:
      raise UserError(
        f"patch_size={self.patch_size} is for images, and this task has "
        "sequences: leave it 0."
      )
    if self.objective == "classification" and self.head:
      raise UserError(
        f"head={dict(self.head)} is for language models and segmenters: a "
        f"classifier has pool, {', '.join(PLAIN_HEAD)}, head_activation and "
        "interaction."
      )
    if self.max_len < 1 and not self.image:
      raise UserError(
        f"max_len={self.max_len}: a sequence has at least one token."
      )
    has_classes = self.objective not in NO_CLASSES and not self.has_values
    if self.num_classes < 1 and has_classes:
      raise UserError(
        f"num_classes={self.num_classes}: choose at least one class for the "
        f"objective {self.objective!r}."
      )
    if self.objective in TEXTS and not self.vocab_size:
      raise UserError(
        f"The objective {self.objective!r} takes texts, and this task has "
        "numbers or images."
      )
    if self.separator >= max(self.vocab_size, 1):
      raise UserError(
        f"separator={self.separator} is no id of a vocabulary of "
        f"{self.vocab_size}: give a smaller id, or 0 for none."
      )
    if self.objective == "segmentation" and not self.image:
      raise UserError("Segmentation takes images, and this task has sequences.")
    if self.objective in (*NEXT, *MASKED) and self.image:
      raise UserError(
        f"The objective {self.objective!r} takes sequences, and this task has "
        "images."
      )

  def _check_pool(self) -> None:
    """Raises UserError for options of classifiers under another objective.

    And for a class token in front of a mixer that reads earlier tokens alone.
    """
    is_read = self.cls and self.objective in ("classification", "sentences")
    if is_read and self.is_causal:
      raise UserError(
        f'pool="{self.pool}" puts a token in front, which the causal mixer '
        f"{self.variant.mixer!r} reads nothing after: choose another pool, or "
        "mixer.causal=False where the mixer has it."
      )
    if self.objective == "classification":
      return
    pools = ("mean",) if self.predicts_next else ("mean", *FRONT_TOKENS)
    options = {name: getattr(self, name) for name in PLAIN_HEAD}
    if self.objective == "sentences":
      # Sentences are pooled, and pass a layer in training.
      pools = (*heads.POOLS,)
      options |= {"head_dim": 0, "head_init_std": 0.0}
    if self.pool not in pools or options != PLAIN_HEAD:
      options = {"pool": self.pool, **options}
      values = ", ".join(f"{key}={value!r}" for key, value in options.items())
      raise UserError(
        f"{values} are of classifiers: leave them out. Segmenters and models "
        'of masked inputs take pool="cls" for a token in front, or '
        '"distilled" for two.'
      )


def is_causal(variant: Variant, options: Mapping[str, Any]) -> bool:
  """Returns True if a variant's mixer reads earlier tokens only.

  Args:
    variant: mixer in a block.
    options: options of the mixer, those that the variant fixes left out.
  """
  if not variant.mixer:
    return False
  mixer = MIXERS[variant.mixer](**options, **variant.fixed)
  others = getattr(mixer, "options", {})
  return bool(getattr(mixer, "causal", others.get("causal", False)))


def block_of(variant: Variant, *, coupled: bool) -> str:
  """Returns the name of a variant's block, or of that which couples halves."""
  return "coupled" if coupled else variant.block


# Objectives that predict what follows a token, or masked tokens.
NEXT = ("language_model", "next_tokens", "next_values")
MASKED = ("masked_tokens", "masked_values")
TEXTS = ("spans", "sentences")
OBJECTIVES = ("classification", "segmentation", *NEXT, *MASKED, *TEXTS)
NO_CLASSES = ("language_model", *TEXTS)
FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


def _hashable(value: Any) -> Any:
  """Returns a copy of plain data with tuples in place of lists."""
  if isinstance(value, Mapping):
    return {key: _hashable(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return tuple(_hashable(item) for item in value)
  return value


def check_names(
  options: Mapping[str, Any],
  kind: str = "config.model",
  path: str | None = None,
) -> None:
  """Raises UserError for a name that no model has, before there are sizes.

  Checks what does not depend on the task: names and ranges of options, mixer
  and block, and the choices of a few of them. `ModelConfig` checks the rest.

  Args:
    options: fields of `ModelConfig`, those of the task left out or not.
    kind: what the options are, for the message.
    path: path of the options for the message; None for `kind`.
  """
  check_options(kind, ModelConfig, options)
  path = kind if path is None else path
  prefix = f"{path}." if path else ""
  variant = MODELS[options.get("name", "")]
  for option, (what, choices) in CHOICES.items():
    if option in options:
      choose(what, options[option], choices)
  if missing := {"d_model", "num_layers"} - options.keys():
    raise UserError(f"{kind} needs {', '.join(sorted(missing))}: set both.")
  coupled = options.get("coupled", False)
  if coupled and not variant.mixer:
    raise UserError(
      f"coupled=True puts a mixer into other layers, and {options['name']!r} "
      "has no mixer: leave it out."
    )
  _check_sections(options, variant, prefix)


def _check_sections(
  options: Mapping[str, Any], variant: Variant, prefix: str
) -> None:
  """Raises UserError for an option that a section of a model does not have.

  Args:
    options: as for `check_names`.
    variant: mixer and block of the model.
    prefix: path of the sections, for messages.
  """
  coupled = options.get("coupled", False)
  mixer, block, embedding, shared = (
    options.get(name) or {}
    for name in ("mixer", "block", "embedding", "mixer_defaults")
  )
  ranges.check(attention.Attention, shared, f"{prefix}mixer_defaults")
  head = options.get("head") or {}
  for kind_of_head in HEADS.values():
    ranges.check(kind_of_head, head, f"{prefix}head")
  of_decoder = head.get("mixer_defaults") or {}
  ranges.check(attention.Attention, of_decoder, f"{prefix}head.mixer_defaults")
  check_section("embedding", "embedding", Embedding, embedding, prefix=prefix)
  mixer = complete_mixer(variant, mixer, shared)
  if variant.mixer:
    make = MIXERS[variant.mixer]
    kind = f"mixer {variant.mixer!r}"
    check_section("mixer", kind, make, mixer, variant.fixed, prefix)
    module = make(**mixer, **variant.fixed)
    if isinstance(module, attention.Attention):
      module.check_width(options["d_model"] // (2 if coupled else 1))
  elif mixer:
    raise UserError(
      f"The model {options['name']!r} has no mixer: leave mixer={mixer} out."
    )
  name = block_of(variant, coupled=coupled)
  kind = f"block {name!r}"
  check_section("block", kind, BLOCKS[name], block, prefix=prefix)
  concatenate = BLOCKS[name].concatenate_positions
  check_width(options["d_model"], concatenate=concatenate)


def complete_mixer(
  variant: Variant, mixer: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the mixer's options, completed by its variant's and by shared ones.

  Raises:
    UserError: for a shared option that no mixer of heads has.
  """
  for option in shared:
    choose("option of mixer_defaults", option, attention.shared_options())
  taken = taken_defaults(variant, shared)
  taken = {k: v for k, v in taken.items() if k not in variant.fixed}
  return {**taken, **variant.defaults, **mixer}


def taken_defaults(
  variant: Variant, shared: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the defaults that a mixer has as options and does not set."""
  # Keep what the mixer can set and its registration leaves open.
  make = MIXERS[variant.mixer] if variant.mixer else None
  options, fixed = getattr(make, "options", ()), getattr(make, "defaults", {})
  return {k: v for k, v in shared.items() if k in options and k not in fixed}


# Fields that the encoder sets and no config does, by the kind of module.
WIRING = frozenset(
  {"parent", "name", "dtype", "orthogonal_map", "max_len", "d_model"}
)
HIDDEN = {
  "mixer": WIRING | {"residual"},
  "block": WIRING | {"mixer", "num_layers", "layer"},
  "embedding": WIRING
  | {"vocab_size", "positions", "cls", "patch_size", "concatenate", "masked"}
  | {"separator"},
}


class LanguageHead(TypedDict, total=False):
  """Options of the head of a language model; see `LanguageModel`."""

  tied: bool
  dropout_rate: Fraction


class SegmenterHead(TypedDict, total=False):
  """Options of the decoder of a segmenter; see `Segmenter`."""

  num_layers: SmallCount
  dropout_rate: Fraction
  mixer_defaults: Mapping[str, Any]


# Options of heads by objective.
HEADS: Mapping[str, Any] = {
  "language_model": LanguageHead,
  "segmentation": SegmenterHead,
}


def field_names(make: Any) -> list[str]:
  """Returns the names of all fields of a mixer, a block or another module."""
  options = getattr(make, "options", None)
  return list(options or [field.name for field in dataclasses.fields(make)])


def check_section(
  section: str,
  kind: str,
  make: Any,
  options: Mapping[str, Any],
  fixed: Mapping[str, Any] = FrozenDict(),
  prefix: str = "",
) -> None:
  """Raises UserError for an unknown option, or one out of its range.

  Args:
    section: in `HIDDEN`.
    kind: what the options belong to, for the message.
    make: class or factory of the module.
    options: what a config says.
    fixed: options that the variant sets.
    prefix: path of the section above with its dot, for the message, or "".
  """
  hidden = HIDDEN[section] | fixed.keys()
  choices = [name for name in field_names(make) if name not in hidden]
  for option in options:
    if option == "causal" and option not in choices:
      raise UserError(
        f"{kind} has no causal form. Mixers that have one: "
        f"{', '.join(causal_mixers())}."
      )
    if option not in choices:
      raise unknown(f"option of {kind}", option, choices)
  ranges.check(make, options, f"{prefix}{section}")


def causal_mixers() -> list[str]:
  """Returns the names of the mixers in which no token need see a later one."""
  return [n for n in MIXERS if "causal" in field_names(MIXERS[n])]


def resolve_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a run's config with `mixer_defaults` as options of the mixer.

  Two configs of the same models are equal then, whichever way they say it.
  """
  # Move the shared defaults into the options of both models.
  resolved = dict(config)
  for section in ("model", "reference"):
    options = dict(config.get(section, {}))
    if options.get("name") in MODELS:
      shared = options.pop("mixer_defaults", {})
      taken = taken_defaults(MODELS[options["name"]], shared)
      options["mixer"] = {**taken, **options.get("mixer", {})}
      resolved[section] = options
  return resolved
