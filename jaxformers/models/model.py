"""Models by name, and the base class of classifiers and all other models.

`bind_encoder`, `bind_block` and `bind_mixer` bind the options of a config to
the modules that every model has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry, call, unknown
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.invertible import layers_of, model_names
from jaxformers.models.config import (
  FIELDS,
  PLAIN_HEAD,
  ModelConfig,
  field_names,
)
from jaxformers.models.embedding import Embedding
from jaxformers.models.encoder import Encoder
from jaxformers.models.kinds import find_kinds
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.convolution import move_back, to_front
from jaxformers.models.norm import RUNNING
from jaxformers.models.variants import MODELS

Make = functools.partial[Any]
# Classes of models by objective; each registers in its own file.
CLASSES: Registry = Registry("objective")
# Fields of `ModelConfig` that say something of the encoder.
ENCODER_FIELDS = tuple(
  field
  for field in FIELDS
  if field not in PLAIN_HEAD
  and field
  not in (
    "name",
    "num_classes",
    "objective",
    "num_inputs",
    "padded_len",
    "head",
    "head_activation",
    "interaction",
  )
)


def _bind(
  make: Any,
  config: ModelConfig,
  length: int,
  options: Mapping[str, Any],
  **wiring: Any,
) -> Make:
  """Binds options, and of the wiring what the module has a field for."""
  wiring = {
    "dtype": jnp.dtype(config.dtype),
    "orthogonal_map": config.orthogonal_map,
    "max_len": length,
    **wiring,
  }
  fields = field_names(make)
  return functools.partial(
    make, **options, **{k: v for k, v in wiring.items() if k in fields}
  )


def bind_mixer(
  config: ModelConfig, length: int, options: dict[str, Any] | None = None
) -> Make | None:
  """Binds the options of a layer's mixer; None for blocks without one.

  Args:
    config: configuration of the model.
    length: greatest number of tokens, one in front included.
    options: options of the mixer; those of the config if None.
  """
  variant = config.variant
  if not variant.mixer:
    return None
  options = config.mixer_options() if options is None else options
  make = MIXERS[variant.mixer]
  return _bind(make, config, length, options, **variant.fixed)


def bind_block(
  config: ModelConfig,
  mixer: Make | None,
  length: int,
  num_layers: int,
  **changes: Any,
) -> Make:
  """Binds the options of a layer.

  Args:
    config: configuration of the model.
    mixer: result of `bind_mixer`.
    length: greatest number of tokens, one in front included.
    num_layers: number of layers of the stack.
    **changes: options of the block that differ from the config's.
  """
  return _bind(
    BLOCKS[config.block_name],
    config,
    length,
    {**config.block, **changes},
    mixer=mixer,
    num_layers=num_layers,
  )


def bind_encoder_block(config: ModelConfig) -> Make:
  """Binds the options of a layer of the encoder."""
  length = config.encoder_len
  mixer = bind_mixer(config, length)
  return bind_block(config, mixer, length, config.num_layers)


def bind_encoder(config: ModelConfig) -> Make:
  """Binds the options of the encoder."""
  embedding = functools.partial(
    Embedding,
    vocab_size=config.vocab_size,
    max_len=config.num_tokens,
    d_model=config.d_model,
    positions=config.positions,
    cls=config.cls,
    patch_size=config.patch_size,
    masked=config.masks_values,
    separator=config.separator,
    **config.embedding,
  )
  return functools.partial(
    Encoder,
    embedding=embedding,
    block=bind_encoder_block(config),
    num_layers=config.num_layers,
    dropout_rate=config.dropout_rate,
    memory=config.memory,
  )


def check_mixer(config: ModelConfig, mixer: Make | None, n: int) -> None:
  """Traces a mixer on n tokens; if None, a block of the encoder."""
  make = bind_encoder_block(config) if mixer is None else mixer
  # Trace shapes alone: nothing is computed.
  x = jax.ShapeDtypeStruct((1, n, config.d_model), jnp.dtype(config.dtype))
  mask = jax.ShapeDtypeStruct((1, n), bool)
  # Without a parent: inside of another module's call it would be a part of it.
  init = functools.partial(make(parent=None).init, carry=None, train=False)
  jax.eval_shape(lambda x, mask: init(jax.random.key(0), x, mask=mask), x, mask)


def _check_reversible(config: ModelConfig) -> None:
  layers = layers_of(bind_encoder_block(config)(parent=None))
  if layers is None:
    raise UserError(
      'memory="reversible" needs layers that can be undone: those of '
      f'{model_names()}. For other models choose "recomputed".'
    )
  if config.num_layers < layers.least_layers:
    raise UserError(
      f'memory="reversible" with num_layers={config.num_layers}: alpha / '
      "L may come near to 1, and undoing a layer would take forever. Choose at "
      f'least {layers.least_layers} layers, or "recomputed".'
    )


class Model(nn.Module):
  """An encoder and what ends it.

  `apply({"params": params}, ids, train=False)` is a pure function.

  Attributes:
    config: everything that defines the model.
  """

  config: ModelConfig

  @property
  def objective(self) -> str:
    """Objective of the model: see `ModelConfig.objective`."""
    return self.config.objective

  @property
  def orthogonal_map(self) -> str:
    """Map of every orthogonal matrix in the model."""
    return self.config.orthogonal_map

  @nn.nowrap
  def stacks(self) -> dict[str, nn.Module]:
    """Returns an unbound block of each stack of layers, by its parameters."""
    return {"encoder": bind_encoder_block(self.config)(parent=None)}

  @nn.nowrap
  def kinds(self, params: Any) -> Any:
    """Returns a tree with the kind of every parameter: see `kinds`."""
    return find_kinds(self.stacks(), params)

  @nn.nowrap
  def check(self) -> None:
    """Traces a layer on its longest input, so that wrong options raise here.

    Raises:
      UserError: for an option of the layer out of its range; for
        memory="reversible" where layers cannot be undone.
    """
    config, length = self.config, self.config.encoder_len
    if config.memory == "reversible":
      _check_reversible(config)
    # Coupled layers have mixers of half the width: trace the layer.
    mixer = None if config.coupled else bind_mixer(config, length)
    check_mixer(config, mixer, length)

  @nn.nowrap
  def mask(self, ids: jax.Array | np.ndarray) -> jax.Array:
    """Returns where the encoder's tokens are -> bool [b, n].

    The sequences of pairs stand one after the other, [2b, n]; with tokens in
    front [b, n + config.cls].

    Args:
      ids: as in a call.

    Raises:
      UserError: for inputs without tokens.
    """
    config = self.config
    if 0 in ids.shape[1:]:
      raise UserError(
        f"Inputs of the shape {ids.shape} have no tokens: give at least one to "
        "each sample, such as padding (id 0)."
      )
    if config.image:
      return jnp.ones((ids.shape[0], config.encoder_len), bool)
    # NumPy's ids would make a mask of NumPy, whose sums are 64 bits wide.
    ids = jnp.asarray(ids).reshape(-1, ids.shape[-1])
    mask = jnp.ones(ids.shape, bool) if config.real else ids > 0
    if config.cls:
      front = ((0, 0), (config.cls, 0))
      mask = jnp.pad(mask, front, constant_values=True)
    return mask

  @nn.nowrap
  def close_holes(
    self, ids: jax.Array
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Moves tokens to the front of each row, in models that predict the next.

    So padding before or between tokens counts for no position, bias, window or
    chunk of any mixer: a row gives the same as its tokens, and as the steps of
    a cache. Rows with padding at the end only stay as they are.

    Args:
      ids: int32 [b, n]. Real numbers, which have no padding, and inputs of
        models that do not predict the next token stay as they are.

    Returns:
      The ids [b, n]; and the function that moves outputs [b, n, d] back.
    """
    if self.config.real or not self.config.predicts_next:
      return ids, lambda y: y
    ids = jnp.asarray(ids)
    front, moved = to_front(ids[..., None], ids > 0)
    return front[..., 0], lambda y: move_back(y, moved)

  @nn.nowrap
  def example(self, length: int = 2) -> jax.Array:
    """Returns an input of `length` tokens, or one image; zeros.

    Parameters do not depend on the length.
    """
    config = self.config
    if config.image:
      return jnp.zeros((1, *config.image))
    pair = () if config.num_inputs == 1 else (config.num_inputs,)
    dtype: Any = jnp.float32 if config.real else jnp.int32
    return jnp.zeros((1, *pair, length), dtype)


class EncoderModel(Model):
  """Tokens to the output of the encoder, float32 [b, n, d].

  Tokens are ids [b, n], 0 at padding, whose rows mean nothing; or float32
  [b, n], none of them padding; or images, float32 [b, height, width, c].
  """

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    encode = bind_encoder(self.config)(name="encoder")
    return encode(ids, mask=self.mask(ids), train=train)


def build(name: str | ModelConfig, **options: Any) -> Model:
  """Returns the model of a name, or of a config.

  Args:
    name: in `MODELS`; or a `ModelConfig`, such as `config` of another model.
    **options: the other fields of `ModelConfig`; of a config, those to change.

  Raises:
    UserError: see `ModelConfig`; and for options of a mixer that a trace of
      its longest input refuses.
  """
  if isinstance(name, ModelConfig):
    fields = {field: getattr(name, field) for field in FIELDS}
    return from_config(call("build", ModelConfig, fields | options))
  return from_config(_named_config("config.model", name, options))


def encoder(name: str, **options: Any) -> EncoderModel:
  """Returns the encoder of a name, without pool and head.

  It is a Flax module for a model of one's own: in a module's call,
  `encoder(ids, train=train)` is [b, n, d].

  Args:
    name: in `MODELS`.
    **options: the other fields of `ModelConfig` that describe an encoder:
      d_model, num_layers, vocab_size (0 for tokens that are real numbers),
      max_len, image, patch_size, pool ("mean"; "cls" puts a token in front, as
      the first of n + 1), positions, dropout_rate, dtype, orthogonal_map,
      memory, coupled, mixer, mixer_defaults, block, embedding.

  Raises:
    UserError: see `build`; and for a field of a head.
  """
  for option in options:
    if option not in ENCODER_FIELDS:
      raise unknown("argument of encoder", option, ENCODER_FIELDS)
  config = _named_config("encoder", name, {**options, "num_classes": 1})
  model = EncoderModel(config)
  model.check()
  return model


def _named_config(
  kind: str, name: str, options: Mapping[str, Any]
) -> ModelConfig:
  """Returns the config of a name, which is checked before the sizes are."""
  _ = MODELS[name]
  return call(kind, ModelConfig, {**options, "name": name})


def from_config(config: ModelConfig) -> Model:
  """Returns the model of a config; its layers are traced once, on shapes."""
  model = CLASSES[config.objective](config)
  model.check()
  return model


def in_float32(model: Model) -> Model:
  """Returns the same model, of the same parameters, computing in float32."""
  return type(model)(dataclasses.replace(model.config, dtype="float32"))


def shapes(model: Model) -> Any:
  """Returns the tree of a model's parameters as shapes, computing none."""
  init = functools.partial(model.init, train=False)
  return jax.eval_shape(init, jax.random.key(0), model.example())["params"]


def has_statistics(model: Model) -> bool:
  """Returns True if a model has a BatchNorm, whose batches see each other."""
  config = model.config
  return "batch" in (config.block.get("norm_type"), config.pool_norm)


def _is_running(path: Any) -> bool:
  """Returns True for the path of a running average of a norm."""
  return str(getattr(path[-1], "key", "")).startswith(RUNNING)


def size(model: Model) -> int:
  """Returns the number of a model's parameters, as stored.

  Running averages of norms do not count.
  """
  return sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(model))
    if not _is_running(path)
  )
