"""Classifiers: an encoder, a pool and a head."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxformers.models.config import ModelConfig
from jaxformers.models.heads import ClassifierHead
from jaxformers.models.model import CLASSES, Model, bind_encoder
from jaxformers.models.segments import Packed, tokens


def head(config: ModelConfig) -> ClassifierHead:
  """Returns the head of a classifier; call this inside a module's call."""
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
  """Classifier: maps inputs to float32 logits [b, num_classes].

  Inputs are ids [b, n], 0 at padding; or real numbers, float32 [b, n], without
  padding; or images, float32 [b, height, width, c]. Pairs are [b, 2, n]: one
  encoder reads the two sequences separately. The logits of packed rows are
  [b, most, num_classes].
  """

  is_pooled = True
  takes_packed = True

  @nn.compact
  def __call__(
    self, ids: jax.Array, *, train: bool, packed: Packed | None = None
  ) -> jax.Array:
    # The sequences of pairs become adjacent samples, [2 b, n].
    ids, packed, _ = self.close_holes(self._in_rows(ids), packed)
    mask = self.mask(ids, packed)
    encoder = bind_encoder(self.config)(name="encoder")
    x = encoder(ids, mask=mask, train=train)
    logits = head(self.config)(x, tokens(mask), train=train, packed=packed)
    if packed is None:
      return logits
    return logits.reshape(len(ids), packed.most, -1)
