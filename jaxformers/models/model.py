"""The base class of classifiers, language models and segmenters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models import parts
from jaxformers.models.config import ModelConfig


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
    return {"encoder": parts.encoder_block(self.config)(parent=None)}

  @nn.nowrap
  def check(self) -> None:
    """Raises UserError for options that a trace of the layers refuses."""
    parts.check(self.config)

  @nn.nowrap
  def mask(self, ids: jax.Array) -> jax.Array:
    """Returns where the encoder's tokens are -> bool [b, n].

    The sequences of pairs stand one after the other, [2b, n]; with a token in
    front [b, n + 1].

    Args:
      ids: as in a call.
    """
    config = self.config
    if config.image:
      return jnp.ones((len(ids), config.encoder_len), bool)
    ids = ids.reshape(-1, ids.shape[-1])
    mask = jnp.ones(ids.shape, bool) if config.real else ids > 0
    if config.cls:
      mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
    return mask

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
