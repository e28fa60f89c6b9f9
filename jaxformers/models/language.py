"""Decoder-only language models: causal encoders that predict the next token."""

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


@CLASSES.register("language_model")
class LanguageModel(Model):
  """Ids [b, n] to log p of what follows each, float32 [b, n, vocab_size].

  Id 0 is padding and has probability 0; it may stand anywhere in a row, and
  changes nothing for tokens (see `close_holes`). Ids run from 0 to
  vocab_size - 1, frequent ones first if there are cutoffs.

  Options of `ModelConfig.head`:
    tied: True if the softmax shares the embedding's tables (Press and Wolf
      2017).
    dropout_rate: share of the encoder's output that is dropped before the
      softmax in training. Source: `_forward` of Transformer-XL's code (Dai et
      al. 2019, https://arxiv.org/abs/1901.02860).
  `cutoffs` and `div_value` of `ModelConfig.embedding` make input and softmax
  adaptive; see `adaptive`.
  """

  @nn.compact
  def __call__(
    self,
    ids: jax.Array,
    targets: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    train: bool,
  ) -> jax.Array:
    """log p of all ids; or given `targets` [b, n], of these alone, [b, n].

    Where `weights` [b, n] is 0, log p of a target is not needed and is 0.
    """
    encoder = bind_encoder(self.config)(name="encoder")
    ids, move_back = self.close_holes(ids)
    x = move_back(encoder(ids, mask=self.mask(ids), train=train))
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
    # Find the size of the shortlist and of each cluster.
    bounds = edges(config.vocab_size, cutoffs)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    embedded: Any = self.variables["params"]["encoder"]["embedding"]["tokens"]
    tables, projections, biases = [], [], []
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
