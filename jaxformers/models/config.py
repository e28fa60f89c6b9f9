"""Configuration of a model: typed, frozen, and checked when it is created."""

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
# Ways to get the activations of the backward pass: see `ModelConfig.memory`.
MEMORY_MODES = ("stored", *LOOPED)
# Number of learned tokens before the input, by the pool that reads them.
FRONT_TOKENS = {"cls": 1, "distilled": 2}
SECTIONS = ("mixer", "mixer_defaults", "block", "embedding", "head")
# Options that only classifiers have, with their defaults.
PLAIN_HEAD = {
  "pool_norm": "",
  "head_dim": 0,
  "head_layers": 1,
  "head_init_std": 0.0,
  "head_dropout_rate": 0.0,
}
# Options whose values are names: the kind of name, and the choices.
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
  """Complete definition of a model: `config.model`, and sizes of the task.

  A model has its config as `model.config`. To change the dtype or the memory
  mode, use `dataclasses.replace(model.config, dtype="bfloat16")`.

  Attributes:
    vocab_size: number of token ids, including padding (0); 0 if tokens are real
      numbers or patches.
    max_len: greatest number of tokens; ignored for images.
    num_classes: number of logits, at least 1; 0 for language models and models
      of values, which ignore it.
    objective: "classification", "token_classification", "language_model",
      "segmentation", "spans", "sentences", or an objective of `Reconstruction`.
    causal: True if a token may see only itself and earlier tokens. Objectives
      that predict the next token imply it.
    image: (height, width, channels) of images; () for sequences.
    channels: number of channels of the steps of a time series, whose inputs are
      [b, n, channels]; 0 for other inputs. Steps whose channels are all NaN are
      padding, and single NaN are read as 0.
    num_inputs: number of sequences of an example: 1, or 2 for pairs.
    separator: id that ends the first part of a sequence with two parts; 0 if
      sequences have one part.
    padded_len: divisor of the pool "padded_mean"; 0 for max_len.

  Raises:
    UserError: for an unknown name or option, listing the choices; for an option
      out of its range; for options that cannot be combined.

  Example:
    >>> sizes = {"vocab_size": 17, "max_len": 8, "num_classes": 10}
    >>> config = ModelConfig(name="s5", d_model=16, num_layers=1, **sizes)
    >>> dataclasses.replace(config, dtype="bfloat16").dtype
    'bfloat16'
  """

  vocab_size: Count
  max_len: Length
  num_classes: Count = 0
  objective: str = "classification"
  causal: bool = False
  image: tuple[Width, ...] = ()
  channels: Count = 0
  num_inputs: Annotated[int, Interval("[1, 2]")] = 1
  separator: Count = 0
  padded_len: Length = 0

  def __post_init__(self) -> None:
    # Check types before converting values. None stands for an empty section.
    options = {field: getattr(self, field) for field in FIELDS}
    for section in SECTIONS:
      options[section] = {} if options[section] is None else options[section]
    ranges.check(ModelConfig, options)
    # Make all values hashable, so that configs and models are hashable.
    object.__setattr__(self, "image", tuple(self.image))
    for section in SECTIONS:
      section_options = options[section]
      object.__setattr__(self, section, FrozenDict(_hashable(section_options)))
    self._check()

  @property
  def variant(self) -> Variant:
    """Variant (mixer and block) of the model's name."""
    return MODELS[self.name]

  @property
  def block_name(self) -> str:
    """Name of the block of every layer, in `BLOCKS`."""
    return block_of(self.variant, coupled=self.coupled)

  @property
  def must_be_causal(self) -> bool:
    """True if the task lets a token see only itself and earlier tokens."""
    return self.causal or self.objective in NEXT

  @property
  def is_causal(self) -> bool:
    """True if the mixer reads only earlier tokens, for any objective."""
    options = self.mixer_options() if self.variant.mixer else {}
    return is_causal(self.variant, options)

  @property
  def has_values(self) -> bool:
    """True if the model predicts real numbers."""
    return self.objective in ("masked_values", "next_values")

  @property
  def masks_values(self) -> bool:
    """True if inputs are real numbers, and NaN where they are masked."""
    return self.real and self.objective in MASKED

  @property
  def cls(self) -> int:
    """Number of learned tokens that the encoder prepends."""
    return FRONT_TOKENS.get(self.pool, 0)

  @property
  def real(self) -> bool:
    """True if tokens are real numbers."""
    return self.vocab_size == 0 and not self.image

  @property
  def num_tokens(self) -> int:
    """Greatest number of tokens or patches, without prepended tokens."""
    if self.image:
      return num_patches(self.image, self.patch_size)
    return self.max_len

  @property
  def encoder_len(self) -> int:
    """Greatest number of tokens in the encoder, with prepended tokens."""
    return self.num_tokens + self.cls

  def mixer_options(self, *differing: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mixer's options, completed by all defaults that apply.

    Args:
      *differing: defaults that take precedence over `mixer_defaults`.
    """
    shared = dict(self.mixer_defaults)
    for defaults in differing:
      shared |= defaults
    options = complete_mixer(self.variant, self.mixer, shared)
    return {"causal": True} | options if self.must_be_causal else options

  def _check(self) -> None:
    check_names({field: getattr(self, field) for field in FIELDS}, path="")
    compares = self.objective == "sentences"
    if compares and self.interaction:
      raise UserError(
        f"interaction={self.interaction!r} applies to classifiers only; "
        "sentences are compared by their cosine. Leave it empty."
      )
    # Sentences are compared by their cosine: no interaction is needed.
    heads.check(
      self.pool,
      self.head_activation,
      self.interaction,
      1 if compares else self.num_inputs,
      (self.head_dim, self.head_layers),
    )
    self._check_objective()
    self._check_pool()
    # Check the options of the head, and whether the mixer suits the objective.
    head = HEADS.get(self.objective, dict)
    for option in self.head:
      choose("option of head", option, ranges.of(head))
    if self.must_be_causal:
      self._check_causal()
    elif self.objective in MASKED:
      self._check_bidirectional()

  def _check_causal(self) -> None:
    """Raises UserError for a model that sees later tokens than it may."""
    variant, options = self.variant, self.mixer_options()
    kind = f"mixer {variant.mixer!r}"
    if not variant.mixer:
      other = "causal=False" if self.causal else "objective=masked"
      raise UserError(
        f"The model {self.name!r} has no causal form: choose a model that has "
        f"one, or set task.{other}."
      )
    make = MIXERS[variant.mixer]
    check_section("mixer", kind, make, options, variant.fixed)
    # Refuse options that show later tokens to earlier ones.
    if not options["causal"]:
      raise UserError(
        "mixer.causal=False lets a token see later tokens, which this task "
        "does not allow. Remove the option."
      )
    if self.block.get("norm_type") == "batch":
      raise UserError(
        'block.norm_type="batch" averages over all tokens in training, so a '
        "token sees later tokens: choose another norm."
      )

  def _check_bidirectional(self) -> None:
    """Raises UserError for a causal mixer, which sees one side of a token."""
    if self.is_causal:
      raise UserError(
        f"The mixer {self.variant.mixer!r} reads only earlier tokens, but "
        "masked tokens are predicted from both sides: set "
        "task.objective=causal, or mixer.causal=False if the mixer has it."
      )

  def _check_objective(self) -> None:
    """Raises UserError for inputs or options that do not suit the objective."""
    # Check the objective, and options that only some tasks have.
    choose("objective", self.objective, OBJECTIVES)
    if self.patch_size and not self.image:
      raise UserError(
        f"patch_size={self.patch_size} applies to images, but this task has "
        "sequences: set it to 0."
      )
    if self.positions == "sinusoid_2d" and len({*self.image[:2]}) > 1:
      raise UserError(
        f'positions="sinusoid_2d" with image={self.image}: the image is not '
        'square. Choose "sinusoid" or "learned".'
      )
    if self.objective == "classification" and self.head:
      raise UserError(
        f"head={dict(self.head)} is for language models, token classifiers and "
        "segmenters. Use the options of classifiers: pool, "
        f"{', '.join(PLAIN_HEAD)}, head_activation and interaction."
      )
    if self.max_len < 1 and not self.image:
      raise UserError(
        f"max_len={self.max_len} is too small: set it to at least 1."
      )
    is_plain = not self.vocab_size and not self.image and self.num_inputs == 1
    if self.channels and not is_plain:
      raise UserError(
        f"channels={self.channels} is for time series: set vocab_size=0 and "
        "num_inputs=1, and leave out image."
      )
    if self.channels and (self.has_values or self.objective in MASKED):
      raise UserError(
        f"The objective {self.objective!r} predicts numbers of one channel, "
        f"but the steps of this task have {self.channels}: choose another."
      )
    # Check the number of classes.
    has_classes = self.objective not in NO_CLASSES and not self.has_values
    if self.num_classes < 1 and has_classes:
      raise UserError(
        f"num_classes={self.num_classes} is too small: the objective "
        f"{self.objective!r} needs at least one class."
      )
    # Check that the inputs suit the objective.
    if self.objective in TEXTS and not self.vocab_size:
      raise UserError(
        f"The objective {self.objective!r} takes texts, but this task has "
        "numbers or images: choose a task of texts."
      )
    if self.separator >= max(self.vocab_size, 1):
      raise UserError(
        f"separator={self.separator} is not an id of a vocabulary of "
        f"{self.vocab_size}: give a smaller id, or 0 for no separator."
      )
    if self.objective == "segmentation" and not self.image:
      raise UserError("Segmentation takes images, but this task has sequences.")
    if self.objective in (*NEXT, *MASKED, TOKENS) and self.image:
      raise UserError(
        f"The objective {self.objective!r} takes sequences, but this task has "
        "images: choose a task of sequences."
      )

  def _check_pool(self) -> None:
    """Raises UserError for a pool or a head that does not suit the model.

    Refuses options of classifiers under another objective, and a class token
    with a causal mixer, which never lets the token see the input.
    """
    # A prepended token must see the input if the head reads it.
    is_read = self.cls and self.objective in ("classification", "sentences")
    if is_read and self.is_causal:
      raise UserError(
        f'pool="{self.pool}" prepends a token, and the causal mixer '
        f"{self.variant.mixer!r} never lets it see the tokens after it: choose "
        "another pool, or mixer.causal=False if the mixer has it."
      )
    if self.objective == "classification":
      return
    # Other objectives read no pooled vector: allow only the defaults.
    pools = ("mean",) if self.must_be_causal else ("mean", *FRONT_TOKENS)
    options = {name: getattr(self, name) for name in PLAIN_HEAD}
    if self.objective == "sentences":
      # Sentences are pooled, and pass through a layer in training.
      pools = (*heads.POOLS,)
      options |= {"head_dim": 0, "head_init_std": 0.0}
    if self.pool not in pools or options != PLAIN_HEAD:
      options = {"pool": self.pool, **options}
      values = ", ".join(f"{key}={value!r}" for key, value in options.items())
      raise UserError(
        f"{values} apply to classifiers only. Remove them. Segmenters and "
        'models of masked inputs accept pool="cls", which prepends a token, '
        'and "distilled", which prepends two.'
      )


def is_causal(variant: Variant, options: Mapping[str, Any]) -> bool:
  """Returns True if a variant's mixer reads only earlier tokens.

  Args:
    variant: mixer and block.
    options: options of the mixer, without the options that the variant fixes.
  """
  if not variant.mixer:
    return False
  mixer = MIXERS[variant.mixer](**options, **variant.fixed)
  others = getattr(mixer, "options", {})
  return bool(getattr(mixer, "causal", others.get("causal", False)))


def block_of(variant: Variant, *, coupled: bool) -> str:
  """Returns the name of a variant's block; "coupled" for coupled layers."""
  return "coupled" if coupled else variant.block


# Objectives that predict the next token or value.
NEXT = ("language_model", "next_tokens", "next_values")
# Objectives that predict masked tokens or values.
MASKED = ("masked_tokens", "masked_values")
# Objective that predicts a class for every token.
TOKENS = "token_classification"
# Objectives that take only texts.
TEXTS = ("spans", "sentences")
OBJECTIVES = (
  "classification",
  "segmentation",
  TOKENS,
  *NEXT,
  *MASKED,
  *TEXTS,
)
NO_CLASSES = ("language_model", *TEXTS)
FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


def _hashable(value: Any) -> Any:
  """Returns a copy of plain data with tuples instead of lists."""
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
  """Raises UserError for wrong names of options, before task sizes are known.

  Checks everything that does not depend on the task: the names and ranges of
  options, the mixer, the block, and options whose values are names.
  `ModelConfig` checks the rest.

  Args:
    options: fields of `ModelConfig`, with or without the fields of the task.
    kind: description of the options, for the message.
    path: path of the options, for the message; None for `kind`.
  """
  # Check names and types of all fields, and the name of the model.
  check_options(kind, ModelConfig, options)
  path = kind if path is None else path
  prefix = f"{path}." if path else ""
  variant = MODELS[options.get("name", "")]
  # Check options whose values are names.
  for option, (what, choices) in CHOICES.items():
    if option in options:
      choose(what, options[option], choices)
  if missing := {"d_model", "num_layers"} - options.keys():
    raise UserError(f"{kind} needs {', '.join(sorted(missing))}: set both.")
  coupled = options.get("coupled", False)
  if coupled and not variant.mixer:
    raise UserError(
      f"coupled=True puts a mixer into coupled layers, but the model "
      f"{options['name']!r} has no mixer: remove coupled."
    )
  _check_sections(options, variant, prefix)


def _check_sections(
  options: Mapping[str, Any], variant: Variant, prefix: str
) -> None:
  """Raises UserError for an option that its section does not have.

  Args:
    options: options of the model, as for `check_names`.
    variant: mixer and block of the model.
    prefix: path of the sections, for messages.
  """
  coupled = options.get("coupled", False)
  mixer, block, embedding, shared = (
    options.get(name) or {}
    for name in ("mixer", "block", "embedding", "mixer_defaults")
  )
  # Check the shared defaults, the heads and the embedding.
  ranges.check(attention.Attention, shared, f"{prefix}mixer_defaults")
  head = options.get("head") or {}
  for kind_of_head in HEADS.values():
    ranges.check(kind_of_head, head, f"{prefix}head")
  of_decoder = head.get("mixer_defaults") or {}
  ranges.check(attention.Attention, of_decoder, f"{prefix}head.mixer_defaults")
  check_section("embedding", "embedding", Embedding, embedding, prefix=prefix)
  # Check the options of the mixer, and build it to check the size of its heads.
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
      f"The model {options['name']!r} has no mixer: remove mixer={mixer}."
    )
  # Check the options of the block.
  name = block_of(variant, coupled=coupled)
  kind = f"block {name!r}"
  check_section("block", kind, BLOCKS[name], block, prefix=prefix)
  concatenate = BLOCKS[name].concatenate_positions
  concatenate = concatenate and options.get("positions") != "none"
  check_width(options["d_model"], concatenate=concatenate)


def complete_mixer(
  variant: Variant, mixer: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the mixer's options, completed by defaults.

  Options of the config take precedence over defaults of the variant, and these
  over the shared defaults.

  Args:
    variant: mixer and block.
    mixer: options of the mixer in the config.
    shared: `mixer_defaults` of the config.

  Raises:
    UserError: for a shared default that no mixer with heads has.
  """
  for option in shared:
    choose("option of mixer_defaults", option, attention.shared_options())
  # Later entries take precedence.
  taken = taken_defaults(variant, shared)
  taken = {k: v for k, v in taken.items() if k not in variant.fixed}
  return {**taken, **variant.defaults, **mixer}


def taken_defaults(
  variant: Variant, shared: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the shared defaults that apply to a variant's mixer."""
  # Keep options that the mixer has and its registration does not set.
  make = MIXERS[variant.mixer] if variant.mixer else None
  options, fixed = getattr(make, "options", ()), getattr(make, "defaults", {})
  return {k: v for k, v in shared.items() if k in options and k not in fixed}


# Fields that the encoder sets, so that no config can, by the kind of module.
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


class TokenHead(TypedDict, total=False):
  """Options of the head of a token classifier; see `TokenClassifier`."""

  bottleneck: bool


class SegmenterHead(TypedDict, total=False):
  """Options of the decoder of a segmenter; see `Segmenter`."""

  num_layers: SmallCount
  dropout_rate: Fraction
  mixer_defaults: Mapping[str, Any]


# Types of the options of heads, by objective.
HEADS: Mapping[str, Any] = {
  "language_model": LanguageHead,
  TOKENS: TokenHead,
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
    section: name of the section, in `HIDDEN`.
    kind: description of the module that has the options, for the message.
    make: class or factory of the module.
    options: options of the section in a config.
    fixed: options that the variant sets.
    prefix: path of the parent section with a final dot, for the message, or "".
  """
  # Only options that neither the encoder nor the variant sets can be changed.
  hidden = HIDDEN[section] | fixed.keys()
  choices = [name for name in field_names(make) if name not in hidden]
  for option in options:
    # Mixers without a causal form get a message that lists those with one.
    if option == "causal" and option not in choices:
      raise UserError(
        f"{kind} has no causal form. Mixers that have one: "
        f"{', '.join(causal_mixers())}."
      )
    if option not in choices:
      raise unknown(f"option of {kind}", option, choices)
  ranges.check(make, options, f"{prefix}{section}")


def causal_mixers() -> list[str]:
  """Returns the names of the mixers that have a causal form."""
  return [n for n in MIXERS if "causal" in field_names(MIXERS[n])]


def resolve_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a run's config with `mixer_defaults` moved to the mixer's options.

  Then two configs that define the same models are equal.
  """
  # Resolve both the model and the reference model.
  resolved = dict(config)
  for section in ("model", "reference"):
    options = dict(config.get(section, {}))
    if options.get("name") in MODELS:
      shared = options.pop("mixer_defaults", {})
      taken = taken_defaults(MODELS[options["name"]], shared)
      options["mixer"] = {**taken, **options.get("mixer", {})}
      resolved[section] = options
  return resolved
