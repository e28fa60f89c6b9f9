"""Decoder-only language models: encoders that predict the next token."""

from __future__ import annotations

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models import adaptive
from jaxformers.models.adaptive import Softmax, edges
from jaxformers.models.dropout import make_dropout
from jaxformers.models.model import CLASSES, Model, bind_encoder
from jaxformers.models.segments import Packed


@CLASSES.register("language_model")
class LanguageModel(Model):
  """Language model: ids [b, n] -> log p of the next id, f32 [b, n, vocab_size].

  Id 0 is padding and has probability 0. Padding may be anywhere in a row, and
  does not change the result at tokens (see `close_holes`). Ids are 0 to
  vocab_size - 1; with cutoffs, frequent ids come first.

  Options of `ModelConfig.head`:
    tied: True (the default) to share the tables of embedding and softmax (Press
      and Wolf 2017).
    dropout_rate: dropout rate of the encoder's output before the softmax, in
      training. Source: `_forward` of Transformer-XL's code (Dai et al. 2019,
      https://arxiv.org/abs/1901.02860).
  `cutoffs` and `div_value` of `ModelConfig.embedding` make embedding and
  softmax adaptive; see `adaptive`.
  """

  takes_packed = True

  @nn.compact
  def __call__(
    self,
    ids: jax.Array,
    targets: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    train: bool,
    packed: Packed | None = None,
  ) -> jax.Array:
    """Returns log p of all ids, or only of `targets`.

    Args:
      ids: int32 [b, n], 0 at padding.
      targets: next ids, int32 [b, n]; None for log p of all ids.
      weights: weights of the targets, [b, n]. Where a weight is 0, log p of the
        target is not computed and the result is 0.
      train: True in training.
      packed: examples of packed rows; None for one example a row.

    Returns:
      float32 [b, n, vocab_size]; with targets, float32 [b, n].
    """
    # Encode the tokens, moved to the front of each row, and move them back.
    encoder = bind_encoder(self.config)(name="encoder")
    ids, packed, move_back = self.close_holes(ids, packed)
    x = move_back(encoder(ids, mask=self.mask(ids, packed), train=train))
    rate = self.config.head.get("dropout_rate", 0.0)
    x = make_dropout(self, rate, train=train)(x)
    softmax = self._softmax()
    # Without targets, return log p of all ids.
    if targets is None:
      return adaptive.log_probabilities(softmax, x)
    if weights is None:
      weights = jnp.ones(targets.shape)
    # Treat the tokens of all sequences as one list.
    flat = (x.reshape(-1, x.shape[-1]), targets.ravel(), weights.ravel())
    return adaptive.log_likelihood(softmax, *flat).reshape(targets.shape)

  def _softmax(self) -> Softmax:
    config, zeros = self.config, nn.initializers.zeros
    d, embedding = config.d_model, config.embedding
    cutoffs = tuple(embedding.get("cutoffs", ()))
    div_value = embedding.get("div_value", 1)
    tied = config.head.get("tied", True)
    # Compute the sizes of the shortlist and of each cluster.
    bounds = edges(config.vocab_size, cutoffs)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    # Parameters of the embedding, which tied softmaxes share.
    embedded: Any = self.variables["params"]["encoder"]["embedding"]["tokens"]
    tables, projections, biases = [], [], []
    # Create the table of each cluster, or share the table of the embedding.
    for i, size in enumerate(sizes):
      width = d // div_value**i
      if not tied:
        init = nn.initializers.normal(0.02)
        tables.append(self.param(f"table_{i}", init, (size, width)))
        init = nn.initializers.normal(width**-0.5)
        narrow = width < d
        projections.append(
          self.param(f"project_{i}", init, (width, d)) if narrow else None
        )
      else:
        name = f"table_{i}" if cutoffs else "embedding"
        tables.append(embedded[name])
        projections.append(embedded.get(f"project_{i}"))
      biases.append(self.param(f"bias_{i}", zeros, (size,)))
    # The shortlist has one entry for each of k clusters.
    k = len(cutoffs)
    return Softmax(
      tuple(tables),
      tuple(projections),
      tuple(biases),
      self.param("clusters", zeros, (k, d)) if k else jnp.zeros((0, d)),
      self.param("cluster_bias", zeros, (k,)) if k else jnp.zeros(0),
    )
