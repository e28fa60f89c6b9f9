"""Vectors of sentences, whose cosine says how similar they are."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.activations import ACTIVATIONS
from jaxformers.models.heads import POOLS
from jaxformers.models.mixer import kernel_init
from jaxformers.models.model import CLASSES, Model, bind_encoder


@CLASSES.register("sentences")
class SentenceModel(Model):
  """Ids of pairs of sentences [b, 2, n] to their vectors float32 [b, 2, d].

  An encoder and a pool. In training a layer of `head_dim` units, `decoder`,
  follows, with the activation `head_activation`; 0 for none. It is left out in
  evaluation, as in SimCSE without supervision.

  Source: Gao et al. 2021, https://arxiv.org/abs/2104.08821, section 6.3 and
  table D.2.
  """

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    config = self.config
    pairs = ids.shape[:-1]
    ids = ids.reshape(-1, ids.shape[-1])
    mask = self.mask(ids)
    encoder = bind_encoder(config)(name="encoder")
    x = encoder(ids, mask=mask, train=train)
    # Pool in float32 under every compute type.
    padded_len = config.padded_len or config.num_tokens
    x = POOLS[config.pool](x, mask, padded_len).astype(jnp.float32)
    if config.head_dim and (train or self.is_initializing()):
      init = kernel_init(config.head_init_std)
      layer = nn.Dense(config.head_dim, kernel_init=init, name="decoder")
      y = ACTIVATIONS[config.head_activation](layer(x))
      x = y if train else x
    return x.reshape(*pairs, -1)
