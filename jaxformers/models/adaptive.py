"""Adaptive input and softmax: vocabularies of hundreds of thousands of words.

Frequent words stand in a shortlist; rarer ones in clusters, which the shortlist
has one entry for. The embedding and the softmax share their tables.

Sources: Grave et al. 2017, https://arxiv.org/abs/1609.04309; Baevski and Auli
2019, https://arxiv.org/abs/1809.10853; the form without narrower tables
(div_value=1) is that of NeuTRENO's runs on WikiText-103.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.errors import UserError

CHUNK = 1 << 24  # Logits that are held at a time.


def edges(vocab_size: int, cutoffs: tuple[int, ...]) -> tuple[int, ...]:
  """Where shortlist and clusters start and end: (0, *cutoffs, vocab_size).

  Raises:
    UserError: for cutoffs that do not rise or reach the vocabulary's size.
  """
  found = (0, *cutoffs, vocab_size)
  if any(a >= b for a, b in itertools.pairwise(found)):
    raise UserError(
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
      raise UserError(
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

  Tokens are sorted by the cluster of their target, so that a cluster's logits
  are made for its own tokens alone, piece by piece, in either direction: what
  is held is one piece, whatever the vocabulary. Equal to `log_probabilities`
  at the targets. (With a batch split over devices by jit the sorting moves
  tokens between them; under pmap every device sorts its own.)

  Args:
    softmax: of the model.
    h: [t, d].
    targets: int32 [t], from 1.
    weights: [t]; where 0, the result is 0 and costs nothing.

  Returns:
    float32 [t].
  """
  sizes = [len(table) for table in softmax.tables]
  count = len(sizes)
  starts = jnp.cumsum(jnp.array([0, *sizes]))
  cluster = jnp.searchsorted(starts[1:-1], targets, side="right")
  # What has no weight comes last, and asks for nothing.
  cluster = jnp.where(weights > 0, cluster, count)
  order = jnp.argsort(cluster, stable=True)
  sorted_h, own = h[order], cluster[order]
  place = targets[order] - starts[jnp.minimum(own, count - 1)]
  first = jnp.searchsorted(own, jnp.arange(count + 1))
  table, bias = softmax.tables[0], softmax.biases[0]
  bias = bias.at[0].set(-jnp.inf)
  if count > 1:
    table = jnp.concatenate([table, softmax.clusters])
    bias = jnp.concatenate([bias, softmax.cluster_bias])
  entry = jnp.where(own == 0, place, sizes[0] + own - 1)
  total = _pieces(sorted_h, table, bias, entry, first[0], first[-1])
  for i in range(1, count):
    narrow, projection = sorted_h, softmax.projections[i]
    if projection is not None:
      narrow = jnp.matmul(narrow, projection.T.astype(h.dtype))
    tail = (softmax.tables[i], softmax.biases[i])
    total = total + _pieces(narrow, *tail, place, first[i], first[i + 1])
  return jnp.zeros(len(h), jnp.float32).at[order].set(total)


@jax.custom_vjp
def _pieces(
  h: jax.Array,
  table: jax.Array,
  bias: jax.Array,
  place: jax.Array,
  start: jax.Array,
  stop: jax.Array,
) -> jax.Array:
  """log softmax(h table.T + bias) at `place`, in rows start to stop -> f32 [t].

  0 in the other rows, which cost nothing: the loop has as many turns as there
  are pieces of rows, and so has that of the backward pass, which makes the
  logits again.
  """
  size = _piece(h, table)
  rows = _Rows(h, place, size)

  def turn(k: jax.Array, total: jax.Array) -> jax.Array:
    at, there = rows.at(k, start, stop)
    log_p = _log_softmax(rows.h(at), table, bias)
    found = jnp.take_along_axis(log_p, rows.place(at, table)[:, None], 1)[:, 0]
    return rows.add(total, at, jnp.where(there, found, 0))

  total = jnp.zeros(len(h) + size, jnp.float32)
  return jax.lax.fori_loop(0, _turns(start, stop, size), turn, total)[: len(h)]


def _log_softmax(h: jax.Array, table: jax.Array, bias: jax.Array) -> jax.Array:
  logits = jnp.matmul(
    h, table.T.astype(h.dtype), preferred_element_type=jnp.float32
  )
  return jax.nn.log_softmax(_plus(logits, bias), axis=-1)


def _piece(h: jax.Array, table: jax.Array) -> int:
  return max(1, min(len(h), CHUNK // len(table)))


def _turns(start: jax.Array, stop: jax.Array, size: int) -> jax.Array:
  return (stop - start + size - 1) // size


class _Rows:
  """Pieces of some rows; beyond the last there are rows of zeros."""

  def __init__(self, h: jax.Array, place: jax.Array, size: int) -> None:
    self.size = size
    self._h = jnp.pad(h, ((0, size), (0, 0)))
    self._place = jnp.pad(place, (0, size))

  def at(
    self, k: jax.Array, start: jax.Array, stop: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Where piece k begins, and which of its rows are before `stop`."""
    at = start + k * self.size
    return at, at + jnp.arange(self.size) < stop

  def h(self, at: jax.Array) -> jax.Array:
    """The rows from `at` on."""
    return jax.lax.dynamic_slice_in_dim(self._h, at, self.size)

  def place(self, at: jax.Array, table: jax.Array) -> jax.Array:
    """Their places in a table."""
    # A row of another cluster may have any place.
    own = jax.lax.dynamic_slice_in_dim(self._place, at, self.size)
    return jnp.clip(own, 0, len(table) - 1)

  def add(self, total: jax.Array, at: jax.Array, own: jax.Array) -> jax.Array:
    """`total`, to whose rows from `at` on `own` is added."""
    before = jax.lax.dynamic_slice_in_dim(total, at, self.size)
    return jax.lax.dynamic_update_slice_in_dim(total, before + own, at, 0)


def _forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _pieces(*args), args


def _backward(kept: tuple[jax.Array, ...], slope: jax.Array) -> tuple[Any, ...]:
  h, table, bias, place, start, stop = kept
  size = _piece(h, table)
  rows = _Rows(h, place, size)
  slope = jnp.pad(slope, (0, size))

  def turn(k: jax.Array, grads: Any) -> Any:
    to_h, to_table, to_bias = grads
    at, there = rows.at(k, start, stop)
    own = jax.lax.dynamic_slice_in_dim(slope, at, size)
    own = jnp.where(there, own, 0)
    p = jnp.exp(_log_softmax(rows.h(at), table, bias))
    hit = (jnp.arange(size), rows.place(at, table))
    by_logits = (-own[:, None] * p).at[hit].add(own)
    narrow = by_logits.astype(h.dtype)
    to_h = rows.add(to_h, at, narrow @ table.astype(h.dtype))
    to_table = to_table + jnp.matmul(
      narrow.T, rows.h(at), preferred_element_type=jnp.float32
    )
    return to_h, to_table, to_bias + by_logits.sum(0)

  zeros = (
    jnp.zeros((len(h) + size, h.shape[1]), h.dtype),
    jnp.zeros(table.shape, jnp.float32),
    jnp.zeros(bias.shape, jnp.float32),
  )
  turns = _turns(start, stop, size)
  to_h, to_table, to_bias = jax.lax.fori_loop(0, turns, turn, zeros)
  return (
    to_h[: len(h)],
    to_table.astype(table.dtype),
    to_bias.astype(bias.dtype),
    None,
    None,
    None,
  )


_pieces.defvjp(_forward, _backward)
