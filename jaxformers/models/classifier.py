"""Classifiers: an encoder, a pool and a head."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxformers.models.config import ModelConfig
from jaxformers.models.heads import ClassifierHead
from jaxformers.models.model import CLASSES, Model, bind_encoder


def head(config: ModelConfig) -> ClassifierHead:
  """Returns the head of a classifier, inside a module's call."""
  return ClassifierHead(
    num_classes=config.num_classes,
    pool=config.pool,
    pool_norm=config.pool_norm,
    head_dim=config.head_dim,
    head_layers=config.head_layers,
    activation=config.head_activation,
    init_std=config.head_init_std,
    dropout_rate=config.head_dropout_rate,
    interaction=config.interaction,
    padded_len=config.padded_len or config.num_tokens,
    name="head",
  )


@CLASSES.register("classification")
class Classifier(Model):
  """Tokens to float32 logits [b, num_classes].

  Tokens are ids [b, n], 0 at padding, or float32 [b, n], none of them padding;
  [b, 2, n] for pairs, which one encoder reads apart; or the patches of images,
  float32 [b, height, width, c].
  """

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    if self.config.num_inputs > 1:
      ids = ids.reshape(-1, ids.shape[-1])
    mask = self.mask(ids)
    encoder = bind_encoder(self.config)(name="encoder")
    x = encoder(ids, mask=mask, train=train)
    return head(self.config)(x, mask, train=train)
