"""Adaptive input and softmax: vocabularies of hundreds of thousands of words.

Frequent words stand in a shortlist; rarer ones in clusters, which the shortlist
has one entry for. The embedding and the softmax share their tables.

Sources: Grave et al. 2017, https://arxiv.org/abs/1609.04309; Baevski and Auli
2019, https://arxiv.org/abs/1809.10853; the form without narrower tables
(div_value=1) is that of NeuTRENO's runs on WikiText-103.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

CHUNK = 1 << 22  # Logits that are held at a time.


def edges(vocab_size: int, cutoffs: tuple[int, ...]) -> tuple[int, ...]:
  """Where shortlist and clusters start and end: (0, *cutoffs, vocab_size).

  Raises:
    ValueError: for cutoffs that do not rise or reach the vocabulary's size.
  """
  found = (0, *cutoffs, vocab_size)
  if any(a >= b for a, b in itertools.pairwise(found)):
    raise ValueError(
      f"cutoffs={cutoffs} of a vocabulary of {vocab_size:,} ids: they must "
      "rise and lie between 0 and its size. Leave out those that are too large."
    )
  return found


class AdaptiveEmbedding(nn.Module):
  """ids [b, n] -> float32 [b, n, d], the tables cut at `cutoffs`.

  The parameters are `table_i` [size, d / div_value^i] and, where that is
  narrower than d, `project_i` [d / div_value^i, d].

  Attributes:
    vocab_size: ids run from 0 to vocab_size - 1, frequent ones first.
    d_model: d.
    cutoffs: ids at which a cluster starts, ascending.
    div_value: how many times narrower each cluster is than the one before.
    table_init: of the tables.
  """

  vocab_size: int
  d_model: int
  cutoffs: tuple[int, ...]
  div_value: int
  table_init: Any

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    bounds = edges(self.vocab_size, self.cutoffs)
    if self.div_value < 1 or self.d_model % self.div_value ** len(self.cutoffs):
      raise ValueError(
        f"div_value={self.div_value} with {len(self.cutoffs)} cutoffs does not "
        f"divide d_model={self.d_model}: choose 1, or another width."
      )
    total: Any = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
      width = self.d_model // self.div_value**i
      table = self.param(f"table_{i}", self.table_init, (high - low, width))
      x = jnp.take(table, jnp.clip(ids - low, 0, high - low - 1), axis=0)
      if width < self.d_model:
        init = nn.initializers.normal(width**-0.5)
        x = x @ self.param(f"project_{i}", init, (width, self.d_model))
      here = (ids >= low) & (ids < high)
      total = total + jnp.where(here[..., None], x, 0)
    return total


def _plus(logits: jax.Array, bias: jax.Array) -> jax.Array:
  return logits.astype(jnp.float32) + jnp.broadcast_to(bias, logits.shape)


class Softmax(NamedTuple):
  """What turns a hidden vector into the probabilities of all ids.

  Id 0 is padding and has none.

  Attributes:
    tables: of the shortlist and every cluster, float32 [size, width].
    projections: of each, [width, d], or None where the width is d.
    biases: of each, float32 [size].
    clusters: float32 [k, d], the shortlist's entries for the k clusters.
    cluster_bias: float32 [k].
  """

  tables: tuple[jax.Array, ...]
  projections: tuple[jax.Array | None, ...]
  biases: tuple[jax.Array, ...]
  clusters: jax.Array
  cluster_bias: jax.Array

  def _logits(self, h: jax.Array, i: int) -> jax.Array:
    if self.projections[i] is not None:
      h = jnp.matmul(h, self.projections[i].T.astype(h.dtype))
    logits = jnp.matmul(
      h, self.tables[i].T.astype(h.dtype), preferred_element_type=jnp.float32
    )
    return _plus(logits, self.biases[i])

  def head(self, h: jax.Array) -> jax.Array:
    """log p of the shortlist and then of the clusters -> [..., size + k]."""
    words = self._logits(h, 0)
    words = words.at[..., 0].set(-jnp.inf)
    if len(self.tables) > 1:
      clusters = jnp.matmul(
        h, self.clusters.T.astype(h.dtype), preferred_element_type=jnp.float32
      )
      clusters = _plus(clusters, self.cluster_bias)
      words = jnp.concatenate([words, clusters], -1)
    return jax.nn.log_softmax(words, axis=-1)

  def tail(self, h: jax.Array, i: int) -> jax.Array:
    """log p of the words of cluster i, from 1, given the cluster."""
    return jax.nn.log_softmax(self._logits(h, i), axis=-1)


def log_probabilities(softmax: Softmax, h: jax.Array) -> jax.Array:
  """log p of every id, -inf for padding: h [..., d] -> f32 [..., ids]."""
  head = softmax.head(h)
  short = len(softmax.tables[0])
  tails = (
    softmax.tail(h, i) + head[..., short + i - 1, None]
    for i in range(1, len(softmax.tables))
  )
  return jnp.concatenate([head[..., :short], *tails], -1)


def log_likelihood(
  softmax: Softmax, h: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
  """log p of given ids, and of no others where that saves work.

  Tokens are sorted by the cluster of their target and taken in pieces, so that
  a cluster's logits are made for the pieces that need them alone, and are made
  again in the backward pass. Equal to `log_probabilities` at the targets.

  Args:
    softmax: of the model.
    h: [t, d].
    targets: int32 [t], from 1.
    weights: [t]; where 0, the result is 0 and costs nothing.

  Returns:
    float32 [t].
  """
  sizes = [len(table) for table in softmax.tables]
  starts = jnp.cumsum(jnp.array([0, *sizes]))
  cluster = jnp.searchsorted(starts[1:-1], targets, side="right")
  # What has no weight comes last, and asks for no cluster.
  cluster = jnp.where(weights > 0, cluster, len(sizes))
  total = len(h)
  piece = max(1, min(total, CHUNK // max(sizes)))
  filled = -(-total // piece) * piece
  order = jnp.argsort(cluster, stable=True)
  padded = jnp.concatenate([order, jnp.zeros(filled - total, order.dtype)])

  @jax.checkpoint
  def one(h: jax.Array, target: jax.Array, own: jax.Array) -> jax.Array:
    def likelihood() -> jax.Array:
      head = softmax.head(h)
      place = jnp.where(own == 0, target, sizes[0] + own - 1)
      found = jnp.take_along_axis(
        head, jnp.clip(place, 0, head.shape[-1] - 1)[:, None], 1
      )[:, 0]
      for i in range(1, len(sizes)):
        found = found + jax.lax.cond(
          (own == i).any(), functools.partial(in_cluster, i), nothing
        )
      return jnp.where(own < len(sizes), found, 0)

    def in_cluster(i: int) -> jax.Array:
      place = jnp.clip(target - starts[i], 0, sizes[i] - 1)
      found = jnp.take_along_axis(softmax.tail(h, i), place[:, None], 1)[:, 0]
      return jnp.where(own == i, found, 0)

    def nothing() -> jax.Array:
      return jnp.zeros(len(h), jnp.float32)

    return jax.lax.cond((own < len(sizes)).any(), likelihood, nothing)

  rows = padded.reshape(-1, piece)
  if len(rows) == 1:
    found = one(h[rows[0]], targets[rows[0]], cluster[rows[0]])
  else:
    found = jax.lax.map(
      lambda at: one(h[at], targets[at], cluster[at]), rows
    ).ravel()
  return jnp.zeros(total, jnp.float32).at[order].set(found[:total])
