"""Adaptive embedding and softmax, for vocabularies of 100,000 words and more.

Frequent words form a shortlist, and rarer words form clusters. The shortlist
has one extra entry for each cluster. Embedding and softmax share their tables.

Sources: Grave et al. 2017, https://arxiv.org/abs/1609.04309; Baevski and Auli
2019, https://arxiv.org/abs/1809.10853. NeuTRENO's runs on WikiText-103 use
tables of equal width (div_value=1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError

CHUNK = 1 << 24  # Greatest number of logits in memory at a time.


def edges(vocab_size: int, cutoffs: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the id bounds of shortlist and clusters: (0, *cutoffs, vocab_size).

  Raises:
    UserError: for cutoffs that do not rise, or that are not between 0 and the
      size of the vocabulary.
  """
  bounds = (0, *cutoffs, vocab_size)
  if any(a >= b for a, b in itertools.pairwise(bounds)):
    raise UserError(
      f"cutoffs={cutoffs} must rise and lie between 0 and the size of the "
      f"vocabulary, {vocab_size:,}: remove the cutoffs that are too large."
    )
  return bounds


class AdaptiveEmbedding(nn.Module):
  """Embeds ids [b, n] -> float32 [b, n, d], with one table for each cluster.

  The parameters are `table_i` [size, d / div_value^i] and, for tables narrower
  than d, `project_i` [d / div_value^i, d].

  Attributes:
    vocab_size: number of ids; frequent ids come first.
    d_model: width d.
    cutoffs: first id of each cluster, ascending.
    div_value: factor by which each cluster is narrower than the one before.
    table_init: initializer of the tables.
  """

  vocab_size: int
  d_model: int
  cutoffs: tuple[int, ...]
  div_value: int
  table_init: Any

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    bounds = edges(self.vocab_size, self.cutoffs)
    # The widths d / div_value^i of all clusters must be integers.
    if self.div_value < 1 or self.d_model % self.div_value ** len(self.cutoffs):
      raise UserError(
        f"div_value={self.div_value} with {len(self.cutoffs)} cutoffs does not "
        f"divide d_model={self.d_model}: choose 1, or another d_model."
      )
    total: Any = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
      # Rarer clusters have narrower vectors, projected to the width d.
      width = self.d_model // self.div_value**i
      table = self.param(f"table_{i}", self.table_init, (high - low, width))
      # Look up every id in every table, and keep the rows of this cluster.
      x = jnp.take(table, jnp.clip(ids - low, 0, high - low - 1), axis=0)
      if width < self.d_model:
        init = nn.initializers.normal(width**-0.5)
        x = x @ self.param(f"project_{i}", init, (width, self.d_model))
      is_inside = (ids >= low) & (ids < high)
      total = total + jnp.where(is_inside[..., None], x, 0)
    return total


class Softmax(NamedTuple):
  """Weights that turn a hidden vector into the probabilities of all ids.

  Id 0 is padding and has no probability.

  Attributes:
    tables: rows of the shortlist and of every cluster, float32 [size, width].
    projections: projections of the tables, [width, d], or None if the width is
      d.
    biases: biases of the tables, float32 [size].
    clusters: entries of the shortlist for the k clusters, float32 [k, d].
    cluster_bias: biases of these entries, float32 [k].
  """

  tables: tuple[jax.Array, ...]
  projections: tuple[jax.Array | None, ...]
  biases: tuple[jax.Array, ...]
  clusters: jax.Array
  cluster_bias: jax.Array

  def _logits(self, h: jax.Array, i: int) -> jax.Array:
    projection = self.projections[i]
    if projection is not None:
      h = jnp.matmul(h, projection.T.astype(h.dtype))
    return _logits(h, self.tables[i], self.biases[i])

  def head(self, h: jax.Array) -> jax.Array:
    """Returns log p of the shortlist and the clusters, [..., size + k]."""
    words = self._logits(h, 0)
    # Padding has no probability.
    words = words.at[..., 0].set(-jnp.inf)
    if len(self.tables) > 1:
      clusters = _logits(h, self.clusters, self.cluster_bias)
      words = jnp.concatenate([words, clusters], -1)
    return jax.nn.log_softmax(words, axis=-1)

  def tail(self, h: jax.Array, i: int) -> jax.Array:
    """Returns log p of the words of cluster i >= 1, given the cluster."""
    return jax.nn.log_softmax(self._logits(h, i), axis=-1)


def _logits(h: jax.Array, table: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns h table.T + bias in float32."""
  logits = jnp.matmul(
    h, table.T.astype(h.dtype), preferred_element_type=jnp.float32
  )
  logits = logits.astype(jnp.float32)
  return logits + jnp.broadcast_to(bias, logits.shape)


def log_probabilities(softmax: Softmax, h: jax.Array) -> jax.Array:
  """Returns log p of every id: h [..., d] -> float32 [..., ids].

  The padding id has log p = -inf.
  """
  # log p(rare word) = log p(cluster) + log p(word | cluster).
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
  """Returns log p of the targets, without computing the logits of all ids.

  The result equals `log_probabilities` at the targets. Tokens are sorted by the
  cluster of their target. The logits of a cluster are computed only for its
  tokens, in chunks, in the forward and the backward pass. One chunk is in
  memory at a time, for every size of the vocabulary. (If jit splits the batch
  over devices, sorting moves tokens between devices. Under pmap each device
  sorts its tokens.)

  Args:
    softmax: weights of the adaptive softmax.
    h: hidden vectors, [t, d].
    targets: target ids, from 1, int32 [t].
    weights: weights of the tokens, [t]. A token of weight 0 has the result 0
      and costs nothing.

  Returns:
    Log probabilities of the targets, float32 [t].
  """
  # Sort tokens by the cluster of their target; tokens of weight 0 come last.
  sizes = [len(table) for table in softmax.tables]
  count = len(sizes)
  starts = jnp.cumsum(jnp.array([0, *sizes]))
  cluster = jnp.searchsorted(starts[1:-1], targets, side="right")
  cluster = jnp.where(weights > 0, cluster, count)
  order = jnp.argsort(cluster, stable=True)
  h, cluster = h[order], cluster[order]
  # Index the target in its cluster, and find the first token of each cluster.
  entry = targets[order] - starts[jnp.minimum(cluster, count - 1)]
  first = jnp.searchsorted(cluster, jnp.arange(count + 1))
  # Add log p of the target if it is in the shortlist, else of its cluster.
  table, bias = softmax.tables[0], softmax.biases[0]
  bias = bias.at[0].set(-jnp.inf)
  if count > 1:
    table = jnp.concatenate([table, softmax.clusters])
    bias = jnp.concatenate([bias, softmax.cluster_bias])
  head = jnp.where(cluster == 0, entry, sizes[0] + cluster - 1)
  total = _log_p_of_rows(h, table, bias, head, first[0], first[-1])
  # Add log p(target | cluster).
  for i in range(1, count):
    # Narrow the hidden vectors to the width of the cluster's table.
    narrow, projection = h, softmax.projections[i]
    if projection is not None:
      narrow = jnp.matmul(narrow, projection.T.astype(h.dtype))
    tail = (softmax.tables[i], softmax.biases[i])
    rows = (first[i], first[i + 1])
    total = total + _log_p_of_rows(narrow, *tail, entry, *rows)
  # Undo the sorting.
  return jnp.zeros(len(h), jnp.float32).at[order].set(total)


@jax.custom_vjp
def _log_p_of_rows(
  h: jax.Array,
  table: jax.Array,
  bias: jax.Array,
  entry: jax.Array,
  start: jax.Array,
  stop: jax.Array,
) -> jax.Array:
  """Returns log softmax(h table.T + bias) at `entry`, for rows start to stop.

  Other rows are 0 and cost nothing: the loop runs over chunks of the rows from
  start to stop. The backward pass runs a loop over the same chunks and computes
  the logits again.

  Args:
    h: hidden vectors, [t, d].
    table: rows of the logits, [size, d].
    bias: biases of the logits, [size].
    entry: column to read in each row, [t].
    start, stop: first row to compute, and the row after the last.

  Returns:
    Log probabilities, float32 [t].
  """
  size, count, read = _pieces(h, table, entry, start, stop)

  def add_piece(k: jax.Array, total: jax.Array) -> jax.Array:
    piece = read(k)
    log_p = jax.nn.log_softmax(_logits(piece.h, table, bias), axis=-1)
    log_p = jnp.take_along_axis(log_p, piece.entry[:, None], 1)[:, 0]
    return _add(total, piece.start, jnp.where(piece.is_inside, log_p, 0))

  total = jnp.zeros(len(h) + size, jnp.float32)
  return jax.lax.fori_loop(0, count, add_piece, total)[: len(h)]


class _Piece(NamedTuple):
  """Chunk of rows that are computed together.

  Attributes:
    start: index of the first row.
    h: hidden vectors, [size, d]; zeros beyond the last row.
    entry: column of each row in the table, [size].
    is_inside: True for rows before `stop`, [size].
  """

  start: jax.Array
  h: jax.Array
  entry: jax.Array
  is_inside: jax.Array


def _pieces(
  h: jax.Array,
  table: jax.Array,
  entry: jax.Array,
  start: jax.Array,
  stop: jax.Array,
) -> tuple[int, jax.Array, Callable[[jax.Array], _Piece]]:
  """Returns size and number of chunks, and a function that reads chunk k."""
  # Bound the logits in memory by CHUNK; pad so that the last chunk is full.
  size = max(1, min(len(h), CHUNK // len(table)))
  padded_h = jnp.pad(h, ((0, size), (0, 0)))
  padded_entry = jnp.pad(entry, (0, size))

  def read(k: jax.Array) -> _Piece:
    at = start + k * size
    rows, columns = (
      jax.lax.dynamic_slice_in_dim(a, at, size)
      for a in (padded_h, padded_entry)
    )
    # Rows beyond `stop` belong to another cluster; their entries may not fit.
    columns = jnp.clip(columns, 0, len(table) - 1)
    return _Piece(at, rows, columns, at + jnp.arange(size) < stop)

  return size, (stop - start + size - 1) // size, read


def _add(total: jax.Array, start: jax.Array, rows: jax.Array) -> jax.Array:
  """Returns `total` with `rows` added to its rows from `start` on."""
  before = jax.lax.dynamic_slice_in_dim(total, start, len(rows))
  return jax.lax.dynamic_update_slice_in_dim(total, before + rows, start, 0)


def _forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _log_p_of_rows(*args), args


def _backward(
  residuals: tuple[jax.Array, ...], slope: jax.Array
) -> tuple[Any, ...]:
  h, table, bias, entry, start, stop = residuals
  size, count, read = _pieces(h, table, entry, start, stop)
  # Loop over the same chunks as the forward pass, and add up the gradients.
  slope = jnp.pad(slope, (0, size))

  def add_piece(k: jax.Array, grads: Any) -> Any:
    to_h, to_table, to_bias = grads
    piece = read(k)
    # d log p[entry] / d logits = onehot(entry) - p.
    g = jax.lax.dynamic_slice_in_dim(slope, piece.start, size)
    g = jnp.where(piece.is_inside, g, 0)
    p = jnp.exp(jax.nn.log_softmax(_logits(piece.h, table, bias), axis=-1))
    to_logits = (-g[:, None] * p).at[jnp.arange(size), piece.entry].add(g)
    # Propagate the gradient to h, table and bias.
    narrow = to_logits.astype(h.dtype)
    to_h = _add(to_h, piece.start, narrow @ table.astype(h.dtype))
    to_table = to_table + jnp.matmul(
      narrow.T, piece.h, preferred_element_type=jnp.float32
    )
    return to_h, to_table, to_bias + to_logits.sum(0)

  # Accumulate over the chunks; rows beyond the last one are cut off.
  zeros = (
    jnp.zeros((len(h) + size, h.shape[1]), h.dtype),
    jnp.zeros(table.shape, jnp.float32),
    jnp.zeros(bias.shape, jnp.float32),
  )
  to_h, to_table, to_bias = jax.lax.fori_loop(0, count, add_piece, zeros)
  to_table, to_bias = to_table.astype(table.dtype), to_bias.astype(bias.dtype)
  return to_h[: len(h)], to_table, to_bias, None, None, None


_log_p_of_rows.defvjp(_forward, _backward)
