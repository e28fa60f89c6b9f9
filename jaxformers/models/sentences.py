"""Sentence embeddings, whose cosine measures the similarity of sentences."""

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
  """Sentence model: ids of pairs [b, 2, n] -> vectors, float32 [b, 2, d].

  The model is an encoder and a pool. In training, a layer `decoder` of
  `head_dim` units with the activation `head_activation` follows; head_dim=0 for
  no layer. Evaluation skips this layer, as in unsupervised SimCSE.

  Source: Gao et al. 2021, https://arxiv.org/abs/2104.08821, section 6.3 and
  table D.2.
  """

  is_pooled = True

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    config = self.config
    # Encode both sentences of each pair separately, [2 b, n].
    pairs = ids.shape[:-1]
    ids = ids.reshape(-1, ids.shape[-1])
    mask = self.mask(ids)
    encoder = bind_encoder(config)(name="encoder")
    x = encoder(ids, mask=mask, train=train)
    # Pool in float32 for every compute type.
    padded_len = config.padded_len or config.num_tokens
    x = POOLS[config.pool](x, mask, padded_len).astype(jnp.float32)
    # Apply the layer in training; initialization creates its parameters.
    if config.head_dim and (train or self.is_initializing()):
      init = kernel_init(config.head_init_std)
      layer = nn.Dense(config.head_dim, kernel_init=init, name="decoder")
      y = ACTIVATIONS[config.head_activation](layer(x))
      x = y if train else x
    return x.reshape(*pairs, -1)
