"""The one encoder: embedding, positions, layers; mixer and block differ."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.blocks import layer_norm
from jaxformers.models.heads import ClassifierHead
from jaxformers.registry import choose


def sinusoids(length: int, d: int) -> np.ndarray:
  """sin(p / 10000^(2i/d)) and its cosine, interleaved -> f32 [length, d].

  Source: Vaswani et al. 2017, section 3.5. (TransJect's code doubles the
  exponent, which leaves half of the channels nearly constant.)
  """
  rates = 10000.0 ** (-np.arange(0, d, 2) / d)
  angles = np.arange(length)[:, None] * rates[None]
  both = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
  return both.reshape(length, -1)[:, :d].astype(np.float32)


class Embedding(nn.Module):
  """Token ids [b, n] and their positions -> float32 [b, n, d].

  Attributes:
    vocab_size: ids run from 0 (padding) to vocab_size - 1.
    max_len: number of positions, for "learned".
    d_model: d.
    positions: "sinusoid" or "learned".
    concatenate: half of the channels for the token and half for its position,
      which is injective (TransJect, section 4.4), instead of their sum.
  """

  vocab_size: int
  max_len: int
  d_model: int
  positions: str = "sinusoid"
  concatenate: bool = False

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    n = ids.shape[1]
    choose("positions", self.positions, ("sinusoid", "learned"))
    if self.concatenate and self.d_model % 2:
      raise ValueError(
        f"d_model={self.d_model} is odd: half of the channels are for the "
        "token and half for its position. Choose an even d_model."
      )
    d = self.d_model // 2 if self.concatenate else self.d_model
    scale = 1.0 if self.concatenate else 0.02
    init = nn.initializers.normal(scale)
    tokens = nn.Embed(self.vocab_size, d, embedding_init=init, name="tokens")
    x = tokens(ids)
    if self.positions == "learned":
      if n > self.max_len:
        raise ValueError(
          f"A sequence of {n} tokens has no learned positions beyond "
          f"max_len={self.max_len}: raise max_len or cut the sequence."
        )
      places = self.param("positions", init, (self.max_len, d))[:n]
    else:
      places = jnp.asarray(sinusoids(n, d))
    places = jnp.broadcast_to(places[None], x.shape)
    x = jnp.concatenate([x, places], -1) if self.concatenate else x + places
    return x


class Encoder(nn.Module):
  """Embeds token ids and applies L blocks: ids [b, n] -> x [b, n, d].

  Every layer's output is sown as `hidden` into `intermediates`, the embedding
  as the first of them.

  Attributes:
    block: makes a block; called with a name. Its class says how positions
      enter and whether a LayerNorm ends the encoder.
    num_layers: L.
    vocab_size, max_len, d_model, positions: see `Embedding`.
    dropout_rate: after the embedding, in training.

  Between the layers x is float32 whatever the compute type is: the small steps
  of a ReZero start would be lost in half precision.
  """

  block: Callable[..., nn.Module]
  num_layers: int
  vocab_size: int
  max_len: int
  d_model: int
  positions: str
  dropout_rate: float

  @nn.compact
  def __call__(
    self, ids: jax.Array, *, mask: jax.Array, train: bool
  ) -> jax.Array:
    blocks = [self.block(name=f"layer_{i}") for i in range(self.num_layers)]
    kind = blocks[0]
    x = Embedding(
      self.vocab_size,
      self.max_len,
      self.d_model,
      self.positions,
      kind.concatenate_positions,
      name="embedding",
    )(ids)
    x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
    self.sow("intermediates", "hidden", x)
    carry = None
    for block in blocks:
      x, carry = block(x, mask=mask, carry=carry, train=train)
      self.sow("intermediates", "hidden", x)
    if kind.final_norm:
      x = layer_norm(x, "norm")
    return x


class Classifier(nn.Module):
  """Token ids [b, n], 0 at padding, to float32 logits [b, num_classes].

  Built by `jaxformers.models.build`; `apply({"params": params}, ids,
  train=False)` is a pure function.

  Attributes:
    encoder: makes the `Encoder`; called with a name.
    num_classes, pool, head_dim: see `ClassifierHead`.
    orthogonal_map: of every orthogonal matrix in the model.
  """

  encoder: Callable[..., nn.Module]
  num_classes: int
  pool: str
  head_dim: int
  orthogonal_map: str

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    mask = ids > 0
    x = self.encoder(name="encoder")(ids, mask=mask, train=train)
    head = functools.partial(ClassifierHead, name="head")
    return head(self.num_classes, self.pool, self.head_dim)(x, mask)
