"""Models by name. A model is a mixer in a block, under the one encoder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers import orthogonal, ranges
from jaxformers.errors import UserError
from jaxformers.models import attention, blocks, heads, mixers, transject
from jaxformers.models.attention import MIXERS
from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.embedding import (
  POSITIONS,
  Embedding,
  check_width,
  num_patches,
)
from jaxformers.models.encoder import ACTIVATIONS, Classifier, Encoder
from jaxformers.models.language import LanguageModel
from jaxformers.models.segmenter import MaskTransformer, Segmenter
from jaxformers.models.variants import MODELS, Variant
from jaxformers.registry import check_options, choose, unknown

__all__ = [
  "MIXERS",
  "MODELS",
  "OBJECTIVES",
  "Model",
  "Variant",
  "blocks",
  "build",
  "check",
  "in_float32",
  "mixers",
  "resolve_defaults",
  "shapes",
  "size",
  "transject",
]

DTYPES = ("float32", "bfloat16")
OBJECTIVES = ("classification", "language_model", "segmentation")
# The defaults of what classifiers alone have.
PLAIN_HEAD = {
  "head_dim": 0,
  "head_layers": 1,
  "head_init_std": 0.0,
  "head_dropout_rate": 0.0,
}
Model = Classifier | LanguageModel | Segmenter


def build(
  name: str,
  *,
  vocab_size: int,
  max_len: int,
  num_classes: int,
  d_model: int,
  num_layers: int,
  objective: str = "classification",
  image: Sequence[int] = (),
  num_inputs: int = 1,
  padded_len: int = 0,
  patch_size: int = 0,
  pool: str = "mean",
  head_dim: int = 0,
  head_layers: int = 1,
  head_activation: str = "relu",
  head_init_std: float = 0.0,
  head_dropout_rate: float = 0.0,
  interaction: str = "",
  positions: str = "sinusoid",
  dropout_rate: float = 0.0,
  dtype: str = "float32",
  orthogonal_map: str = "cayley",
  activations: str = "stored",
  mixer: Mapping[str, Any] | None = None,
  mixer_defaults: Mapping[str, Any] | None = None,
  block: Mapping[str, Any] | None = None,
  embedding: Mapping[str, Any] | None = None,
  head: Mapping[str, Any] | None = None,
) -> Model:
  """The model of a name; all but the sizes of the task is `config.model`.

  Args:
    name: in `MODELS`.
    vocab_size: number of token ids, padding (0) included; 0 if tokens are real
      numbers or patches; from the task.
    max_len: greatest number of tokens, for images of no meaning; from the task.
    num_classes: number of logits, for language models of no meaning; from the
      task.
    d_model: width.
    num_layers: depth, at least 1.
    objective: "classification" makes a `Classifier`, "language_model" a
      `LanguageModel` of a causal mixer, "segmentation" a `Segmenter`; from the
      task.
    image: (height, width, channels), or () for sequences; from the task.
    num_inputs: 2 for pairs; from the task.
    padded_len: what the pool "padded_mean" divides by, 0 for max_len; from the
      task.
    patch_size: side of the patches that images are cut to; 0 for sequences.
    pool, head_dim, head_layers, head_activation, head_init_std,
      head_dropout_rate, interaction: see `heads.ClassifierHead`; for
      classification, and of the pools "cls" puts a token in front for
      segmentation, too.
    positions: "sinusoid", "sinusoid_2d" or "learned".
    dropout_rate: after the embedding.
    dtype: "float32" or "bfloat16": compute type; parameters are float32.
    orthogonal_map: in `orthogonal.MAPS`: "cayley", "expm", "householder", or
      "matrix", for which the optimiser keeps the matrices orthogonal.
    activations: what the backward pass takes: "stored" activations; the
      layers' inputs alone, "recomputed"; or for TransJect the encoder's output
      alone, "reversible", whose memory does not grow with num_layers. See
      `Encoder`.
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

  Raises:
    UserError: for an unknown name or option, naming the choices; for an
      option out of its range; for options that do not go together.
  """
  options = dict(locals())
  sections = ("mixer", "mixer_defaults", "block", "embedding", "head")
  ranges.check(
    {k: v for k, v in options.items() if k not in sections or v is not None}
  )
  variant = MODELS[name]
  head_options = {
    "head_dim": head_dim,
    "head_layers": head_layers,
    "head_init_std": head_init_std,
    "head_dropout_rate": head_dropout_rate,
  }
  choose("objective", objective, OBJECTIVES)
  heads.check(
    pool, head_activation, interaction, num_inputs, (head_dim, head_layers)
  )
  _check_choices(
    orthogonal_map=orthogonal_map, activations=activations, dtype=dtype
  )
  compute = jnp.dtype(dtype)
  image, cls = tuple(image), pool == "cls"
  sizes = (max_len, num_classes, patch_size)
  _check_input(objective, image, *sizes, head or {}, pool, head_options)
  if image:
    max_len = num_patches(image, patch_size)
  parts = _Parts(variant, compute, orthogonal_map, dict(block or {}))
  options = _with_defaults(variant, mixer or {}, mixer_defaults or {})
  if objective == "language_model":
    options = {"causal": True} | options
    if not options["causal"]:
      raise UserError(
        "A language model with mixer.causal=False sees what it predicts: "
        "leave the option out."
      )
  layer = parts.layer(options, max_len + cls, d_model, num_layers)
  if activations == "reversible":
    _check_reversible(layer(parent=None), num_layers)
  make_embedding = _options(
    "embedding",
    Embedding,
    dict(embedding or {}),
    {
      "vocab_size": vocab_size,
      "max_len": max_len,
      "d_model": d_model,
      "positions": positions,
      "cls": cls,
      "patch_size": patch_size,
    },
    hidden=("concatenate",),
  )
  make_encoder = functools.partial(
    Encoder,
    embedding=make_embedding,
    block=layer,
    num_layers=num_layers,
    dropout_rate=dropout_rate,
    activations=activations,
  )
  if objective == "language_model":
    tables = {
      key: value
      for key, value in make_embedding.keywords.items()
      if key in ("cutoffs", "div_value")
    }
    make = _options(
      "head",
      LanguageModel,
      dict(head or {}),
      {
        "encoder": make_encoder,
        "vocab_size": vocab_size,
        "d_model": d_model,
        "orthogonal_map": orthogonal_map,
        **tables,
      },
      hidden=("cutoffs", "div_value"),
    )
    return make()
  if objective == "segmentation":
    decoder_head = {"num_layers": 2, "dropout_rate": 0.1} | dict(head or {})
    length = max_len + num_classes
    differing = decoder_head.pop("mixer_defaults", {})
    options = _with_defaults(
      variant, mixer or {}, {**(mixer_defaults or {}), **differing}
    )
    decoder = functools.partial(
      MaskTransformer,
      block=parts.decoder_layer(options, length, d_model, decoder_head),
      num_layers=decoder_head["num_layers"],
      num_classes=num_classes,
    )
    return Segmenter(
      make_encoder, decoder, orthogonal_map, image, patch_size, cls
    )
  make_head = functools.partial(
    heads.ClassifierHead,
    num_classes=num_classes,
    pool=pool,
    head_dim=head_dim,
    head_layers=head_layers,
    activation=head_activation,
    init_std=head_init_std,
    dropout_rate=head_dropout_rate,
    interaction=interaction,
    padded_len=padded_len or max_len,
  )
  return Classifier(
    make_encoder,
    make_head,
    orthogonal_map,
    num_inputs=num_inputs,
    real=vocab_size == 0 and not image,
    cls=cls,
    image=image,
    patch_size=patch_size,
  )


def check(options: Mapping[str, Any], kind: str = "config.model") -> None:
  """Raises UserError for a name that no model has, before there are sizes.

  Checks what does not depend on the task: names of options, mixer and block,
  and the choices of a few of them. `build` checks the rest.

  Args:
    options: arguments of `build`, those of the task left out.
    kind: what the options are, for the message.
  """
  check_options(kind, build, options)
  variant = MODELS[options.get("name", "")]
  _check_choices(**{k: v for k, v in options.items() if k in CHOICES})
  mixer, block, shared = (
    options.get(name, {}) for name in ("mixer", "block", "mixer_defaults")
  )
  if missing := {"d_model", "num_layers"} - options.keys():
    raise UserError(f"{kind} needs {', '.join(sorted(missing))}: set both.")
  parts = _Parts(variant, jnp.float32, "cayley", dict(block))
  make_mixer, _ = parts.bind(_with_defaults(variant, mixer, shared), 1, 1)
  if isinstance(module := make_mixer(), attention.Attention):
    attention.check_heads(module.num_heads, options["d_model"])
  concatenate = BLOCKS[variant.block].concatenate_positions
  check_width(options["d_model"], concatenate=concatenate)


def resolve_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a run's config with `mixer_defaults` as options of the mixer.

  Two configs of the same models are equal then, whichever way they say it.
  """
  resolved = dict(config)
  for section in ("model", "reference"):
    options = dict(config.get(section, {}))
    if options.get("name") in MODELS:
      shared = options.pop("mixer_defaults", {})
      make = MIXERS[MODELS[options["name"]].mixer]
      taken = _taken_defaults(make, shared)
      options["mixer"] = {**taken, **options.get("mixer", {})}
      resolved[section] = options
  return resolved


# Options whose values are names: what they are called, and the choices.
CHOICES = {
  "orthogonal_map": ("orthogonal map", orthogonal.MAPS),
  "activations": ("activations", ACTIVATIONS),
  "dtype": ("dtype", DTYPES),
  "pool": ("pool", heads.POOLS),
  "positions": ("positions", POSITIONS),
  "head_activation": ("activation", heads.ACTIVATIONS),
}


def _check_choices(**values: str) -> None:
  for option, value in values.items():
    kind, choices = CHOICES[option]
    choose(kind, value, choices)


@dataclasses.dataclass(frozen=True)
class _Parts:
  """What layers are made of."""

  variant: Variant
  dtype: Any
  orthogonal_map: str
  block: dict[str, Any]

  def bind(
    self, mixer: dict[str, Any], length: int, num_layers: int
  ) -> tuple[functools.partial[Any], functools.partial[Any]]:
    """Returns what makes the mixer and the block; names are checked.

    Args:
      mixer: options of the mixer.
      length: greatest number of tokens.
      num_layers: number of layers of the encoder.
    """
    variant = self.variant
    wiring = {
      "dtype": self.dtype,
      "orthogonal_map": self.orthogonal_map,
      "max_len": length,
    }
    make_mixer = _options(
      f"mixer {variant.mixer!r}",
      MIXERS[variant.mixer],
      mixer,
      {**wiring, **variant.fixed},
      hidden=("residual",),
    )
    make_block = _options(
      f"block {variant.block!r}",
      BLOCKS[variant.block],
      self.block,
      {**wiring, "mixer": make_mixer, "num_layers": num_layers},
      hidden=("layer",),
    )
    return make_mixer, make_block

  def layer(
    self, mixer: dict[str, Any], length: int, d_model: int, num_layers: int
  ) -> functools.partial[Any]:
    """Makes a block for at most `length` tokens; its options are checked."""
    make_mixer, make_block = self.bind(mixer, length, num_layers)
    _check_mixer(make_mixer, length, d_model, self.dtype)
    return make_block

  def decoder_layer(
    self,
    mixer: dict[str, Any],
    length: int,
    d_model: int,
    head: dict[str, Any],
  ) -> functools.partial[Any]:
    """Makes a block of the decoder: depth and dropout of head, no drop path."""
    for option in head:
      choose("option of head", option, ("num_layers", "dropout_rate"))
    fields = BLOCKS[self.variant.block].__dataclass_fields__
    block = dict(self.block)
    block.pop("drop_path_rate", None)
    if "dropout_rate" in fields:
      block["dropout_rate"] = head["dropout_rate"]
    plain = dataclasses.replace(self, block=block)
    return plain.layer(mixer, length, d_model, head["num_layers"])


def _with_defaults(
  variant: Variant, mixer: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the mixer's options, completed by its variant's and by shared ones.

  Raises:
    UserError: for a shared option that no mixer of heads has.
  """
  make = MIXERS[variant.mixer]
  for option in shared:
    choose("option of mixer_defaults", option, attention.shared_options())
  taken = _taken_defaults(make, shared)
  taken = {k: v for k, v in taken.items() if k not in variant.fixed}
  return {**taken, **variant.defaults, **mixer}


def _taken_defaults(
  make: Callable[..., Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the defaults that a mixer has as options and does not set."""
  options, fixed = getattr(make, "options", ()), getattr(make, "defaults", {})
  return {k: v for k, v in shared.items() if k in options and k not in fixed}


def _check_pool(
  objective: str, pool: str, head_options: dict[str, float]
) -> None:
  """Raises for what only a classifier has; "mean" stands for no choice."""
  fits = {"language_model": ("mean",), "segmentation": ("mean", "cls")}
  pools = fits.get(objective, (pool,))
  if pool not in pools or (objective in fits and head_options != PLAIN_HEAD):
    options = {"pool": pool, **head_options}
    values = ", ".join(f"{key}={value!r}" for key, value in options.items())
    raise UserError(
      f"{values} are of classifiers: leave them out for a language model; a "
      'segmenter takes pool="cls" for a token in front.'
    )


def _check_input(
  objective: str,
  image: tuple[int, ...],
  max_len: int,
  num_classes: int,
  patch_size: int,
  head: Any,
  pool: str,
  head_options: dict[str, float],
) -> None:
  if patch_size and not image:
    raise UserError(
      f"patch_size={patch_size} is for images, and this task has sequences: "
      "leave it 0."
    )
  if objective == "classification" and head:
    raise UserError(
      f"head={dict(head)} is for language models and segmenters: a classifier "
      f"has pool, {', '.join(PLAIN_HEAD)}, head_activation and interaction."
    )
  _check_pool(objective, pool, head_options)
  if max_len < 1 and not image:
    raise UserError(f"max_len={max_len}: a sequence has at least one token.")
  if num_classes < 1 and objective != "language_model":
    raise UserError(f"num_classes={num_classes}: choose at least one class.")
  if objective == "segmentation" and not image:
    raise UserError("Segmentation takes images, and this task has sequences.")
  if objective == "language_model" and image:
    raise UserError("Language models take sequences, and this task has images.")


def in_float32(model: Model) -> Model:
  """The same model, of the same parameters, computing in float32."""

  def wide(make: functools.partial[Any], **more: Any) -> Any:
    known = {"dtype": jnp.dtype("float32")} if "dtype" in make.keywords else {}
    return functools.partial(make, **known, **more)

  def layers(make: functools.partial[Any]) -> functools.partial[Any]:
    block = make.keywords["block"]
    block = wide(block, mixer=wide(block.keywords["mixer"]))
    return functools.partial(make, block=block)

  parts = {"encoder": layers(model.encoder)}
  if isinstance(model, Segmenter):
    parts["decoder"] = layers(model.decoder)
  return model.clone(**parts)


def causal_mixers() -> list[str]:
  """The names of the mixers in which no token need see a later one."""
  return [n for n in MIXERS if "causal" in getattr(MIXERS[n], "options", ())]


def _check_reversible(block: Any, num_layers: int) -> None:
  if invertible.layers_of(block) is None:
    raise UserError(
      'activations="reversible" needs layers that can be undone: those of '
      'transject and random_transject. For other models choose "recomputed".'
    )
  if num_layers < 2:
    raise UserError(
      f'activations="reversible" with num_layers={num_layers}: alpha / L may '
      "come near to 1, and undoing a layer would take forever. Choose at least "
      '2 layers, or "recomputed".'
    )


def _options(
  kind: str,
  make: Callable[..., Any],
  given: dict[str, Any],
  fixed: dict[str, Any],
  hidden: tuple[str, ...] = (),
) -> Callable[..., Any]:
  """`make` with its options bound; unknown ones raise and list the choices."""
  fields = getattr(make, "options", None)
  fields = fields or [field.name for field in dataclasses.fields(make)]
  fixed = {key: value for key, value in fixed.items() if key in fields}
  own = [
    field
    for field in fields
    if field not in ("parent", "name", *hidden, *fixed)
  ]
  for option in given:
    if option == "causal" and option not in own:
      raise UserError(
        f"{kind} has no causal form. Mixers that have one: "
        f"{', '.join(causal_mixers())}."
      )
    if option not in own:
      raise unknown(f"option of {kind}", option, own)
  return functools.partial(make, **given, **fixed)


def _check_mixer(
  make: Callable[..., Any], n: int, d_model: int, dtype: Any
) -> None:
  """Traces a mixer on its longest input, so that wrong options raise here."""
  x = jax.ShapeDtypeStruct((1, n, d_model), dtype)
  mask = jax.ShapeDtypeStruct((1, n), bool)
  init = functools.partial(make().init, carry=None, train=False)
  jax.eval_shape(lambda x, mask: init(jax.random.key(0), x, mask=mask), x, mask)


def shapes(model: Model) -> Any:
  """The tree of a model's parameters as shapes, without computing any."""
  init = functools.partial(model.init, train=False)
  return jax.eval_shape(init, jax.random.key(0), model.example())["params"]


def size(model: Model) -> int:
  """The number of a model's parameters, as stored."""
  return sum(leaf.size for leaf in jax.tree.leaves(shapes(model)))
