"""Question answering: the first and the last token of the answer in a text."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.mixer import kernel_init
from jaxformers.models.model import CLASSES, Model, bind_encoder


@CLASSES.register("spans")
class SpanModel(Model):
  """Span model: ids [b, n] of question and text -> logits, float32 [b, n, 2].

  The model is an encoder and one linear map, `decoder`. The softmax of the
  logits over the tokens gives the distribution of the first token (column 0)
  and of the last token (column 1) of the answer. The logits of padding are the
  lowest finite number.

  Source: Devlin et al. 2019, https://arxiv.org/abs/1810.04805, section 4.2.
  """

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    encoder = bind_encoder(self.config)(name="encoder")
    mask = self.mask(ids)
    x = encoder(ids, mask=mask, train=train)
    # A prepended class token cannot be part of an answer.
    first = int(self.config.cls)
    x = x[:, first:].astype(jnp.float32)
    y = nn.Dense(2, kernel_init=kernel_init(0.02), name="decoder")(x)
    return jnp.where(mask[:, first:, None], y, jnp.finfo(y.dtype).min)
