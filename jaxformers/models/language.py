"""Decoder-only language models: causal encoders that predict the next token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models import adaptive
from jaxformers.models.adaptive import Softmax, edges
from jaxformers.models.attention import dropout_layer


class LanguageModel(nn.Module):
  """Ids [b, n] to log p of what follows each, float32 [b, n, vocab_size].

  Id 0 is padding and has probability 0. Built by `jaxformers.models.build` with
  objective="language_model".

  Attributes:
    encoder: makes the `Encoder`, whose mixer is causal; called with a name.
    vocab_size: ids run from 0 to vocab_size - 1, frequent ones first if there
      are cutoffs.
    d_model: d.
    orthogonal_map: of every orthogonal matrix in the model.
    tied: whether the softmax shares the embedding's tables (Press and Wolf
      2017).
    cutoffs, div_value: of the adaptive input and softmax; see `adaptive`. ()
      for one plain softmax.
    dropout_rate: share of the encoder's output that is dropped before the
      softmax in training. Source: `_forward` of Transformer-XL's code (Dai et
      al. 2019, https://arxiv.org/abs/1901.02860).
  """

  objective: ClassVar[str] = "language_model"

  encoder: Callable[..., nn.Module]
  vocab_size: int
  d_model: int
  orthogonal_map: str
  tied: bool = True
  cutoffs: tuple[int, ...] = ()
  div_value: int = 1
  dropout_rate: float = 0.0

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
    x = self.encoder(name="encoder")(ids, mask=self.mask(ids), train=train)
    x = dropout_layer(self.dropout_rate, train)(x)
    softmax = self._softmax()
    if targets is None:
      return adaptive.log_probabilities(softmax, x)
    if weights is None:
      weights = jnp.ones(targets.shape)
    flat = (x.reshape(-1, x.shape[-1]), targets.ravel(), weights.ravel())
    return adaptive.log_likelihood(softmax, *flat).reshape(targets.shape)

  def _softmax(self) -> Softmax:
    d, zeros = self.d_model, nn.initializers.zeros
    bounds = edges(self.vocab_size, self.cutoffs)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    own: Any = self.variables["params"]["encoder"]["embedding"]["tokens"]
    tables, projections, biases = [], [], []
    for i, size in enumerate(sizes):
      width = d // self.div_value**i
      if not self.tied:
        init = nn.initializers.normal(0.02)
        tables.append(self.param(f"table_{i}", init, (size, width)))
        init = nn.initializers.normal(width**-0.5)
        narrow = width < d
        projections.append(
          self.param(f"project_{i}", init, (width, d)) if narrow else None
        )
      else:
        name = f"table_{i}" if self.cutoffs else "embedding"
        tables.append(own[name])
        projections.append(own.get(f"project_{i}"))
      biases.append(self.param(f"bias_{i}", zeros, (size,)))
    k = len(self.cutoffs)
    return Softmax(
      tuple(tables),
      tuple(projections),
      tuple(biases),
      self.param("clusters", zeros, (k, d)) if k else jnp.zeros((0, d)),
      self.param("cluster_bias", zeros, (k,)) if k else jnp.zeros(0),
    )

  def mask(self, ids: jax.Array) -> jax.Array:
    """Where tokens are -> bool [b, n]."""
    return ids > 0

  def example(self, length: int = 2) -> jax.Array:
    """One input of `length` tokens; parameters do not depend on it."""
    return jnp.zeros((1, length), jnp.int32)
