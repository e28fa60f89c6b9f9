"""The parts that every model has: its config as an encoder of layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import MIXERS
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.invertible import layers_of
from jaxformers.models.config import ModelConfig, field_names
from jaxformers.models.embedding import Embedding
from jaxformers.models.encoder import Encoder

Make = functools.partial[Any]


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


def mixer(
  config: ModelConfig, length: int, options: dict[str, Any] | None = None
) -> Make | None:
  """Returns what makes the mixer of a layer; None for blocks without one.

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


def block(
  config: ModelConfig,
  make_mixer: Make | None,
  length: int,
  num_layers: int,
  **changes: Any,
) -> Make:
  """Returns what makes a layer.

  Args:
    config: configuration of the model.
    make_mixer: from `mixer`.
    length: greatest number of tokens, one in front included.
    num_layers: number of layers of the stack.
    **changes: options of the block that differ from the config's.
  """
  return _bind(
    BLOCKS[config.variant.block],
    config,
    length,
    {**config.block, **changes},
    mixer=make_mixer,
    num_layers=num_layers,
  )


def encoder_block(config: ModelConfig) -> Make:
  """Returns what makes a layer of the encoder."""
  length = config.encoder_len
  return block(config, mixer(config, length), length, config.num_layers)


def encoder(config: ModelConfig) -> Make:
  """Returns what makes the encoder."""
  embedding = functools.partial(
    Embedding,
    vocab_size=config.vocab_size,
    max_len=config.num_tokens,
    d_model=config.d_model,
    positions=config.positions,
    cls=config.cls,
    patch_size=config.patch_size,
    **config.embedding,
  )
  return functools.partial(
    Encoder,
    embedding=embedding,
    block=encoder_block(config),
    num_layers=config.num_layers,
    dropout_rate=config.dropout_rate,
    memory=config.memory,
  )


def check(config: ModelConfig) -> None:
  """Traces the mixer on its longest input, so that wrong options raise here.

  Raises:
    UserError: for an option of the mixer out of its range; for
      memory="reversible" where layers cannot be undone.
  """
  length = config.encoder_len
  if config.memory == "reversible":
    _check_reversible(config)
  check_mixer(config, mixer(config, length), length)


def check_mixer(config: ModelConfig, make_mixer: Make | None, n: int) -> None:
  """Traces a mixer on n tokens."""
  if make_mixer is None:
    return
  # Trace shapes alone: nothing is computed.
  x = jax.ShapeDtypeStruct((1, n, config.d_model), jnp.dtype(config.dtype))
  mask = jax.ShapeDtypeStruct((1, n), bool)
  init = functools.partial(make_mixer().init, carry=None, train=False)
  jax.eval_shape(lambda x, mask: init(jax.random.key(0), x, mask=mask), x, mask)


def _check_reversible(config: ModelConfig) -> None:
  if layers_of(encoder_block(config)(parent=None)) is None:
    raise UserError(
      'memory="reversible" needs layers that can be undone: those of '
      'transject and random_transject. For other models choose "recomputed".'
    )
  if config.num_layers < 2:
    raise UserError(
      f'memory="reversible" with num_layers={config.num_layers}: alpha / '
      "L may come near to 1, and undoing a layer would take forever. Choose at "
      'least 2 layers, or "recomputed".'
    )
