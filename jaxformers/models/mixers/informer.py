"""Informer: selected queries attend, and the others get the mean value."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Factor, Length, OptionalSize
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import Keys, attend_to, split
from jaxformers.models.mixers.landmarks import ranks, tokens_first
from jaxformers.models.mixers.scores import HIGHEST
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

# Queries of a block of `_measure_by_blocks`, and base of the digits of a key.
BLOCK, DIGIT = 256, 64

MODELS.register("informer")(Variant("informer"))


@attention("informer", growth="n log n", redraw=True)
def informer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  draw: Callable[..., jax.Array],
  max_len: Length,
  factor: Factor = 5.0,
  num_queries: OptionalSize = 0,
  num_samples: OptionalSize = 0,
) -> jax.Array:
  """ProbSparse attention: softmax rows for u queries, the mean of v elsewhere.

  The sparsity measure of a query is the maximum minus the mean of
  q . k / sqrt(e) over sampled keys: for every query `num_samples` keys are
  drawn with replacement. The u = `num_queries` queries of greatest measure
  attend to all tokens. A count of 0 stands for ceil(factor ln max_len).

  Source: Zhou et al. 2021, https://arxiv.org/abs/2012.07436, equations 2 to 4
  and algorithm 1. Equals softmax attention with u = n. Differs from their code
  and Skyformer's: keys, queries and the mean exclude padding; the
  measure subtracts the mean over the samples, not their sum divided by n; the
  counts depend on max_len, so that padding changes nothing; evaluation always
  draws the same samples. No causal form: the choice of queries sees all tokens.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  `draw` returns "samples", [max_len, num_samples] in [0, 1): the sampled keys
  as fractions of the number of tokens.
  """
  if factor <= 0 or num_queries < 0 or num_samples < 0:
    raise UserError(
      f"factor={factor}, num_queries={num_queries}, num_samples={num_samples}: "
      "give a positive factor, and counts of 0 (to use the factor) or more."
    )
  if num_queries > max_len:
    raise UserError(
      f"num_queries={num_queries} is above max_len={max_len}: give a smaller "
      "number."
    )
  # Resolve the counts, and draw the samples.
  n, default = mask.shape[1], math.ceil(factor * math.log(max_len))
  count = min(num_queries or max(1, default), n)
  shape = (max_len, num_samples or max(1, default))
  place = draw("samples", lambda key: jax.random.uniform(key, shape))
  # Select the queries of greatest measure.
  scale = q.shape[-1] ** -0.5
  index = _sampled_keys(mask, place[:n])
  measure = jax.lax.stop_gradient(_measure(q * scale, k, index))
  measure = jnp.where(mask[:, None], measure, -jnp.inf)
  top = jax.lax.top_k(measure, count)[1]  # [b, h, count]
  # Attend from the selected queries to all tokens.
  selected = jnp.take_along_axis(q, top[..., None], 2)
  rows = attend_to(selected, [Keys(k, v, mask[:, None, None])], dropout)
  # Give all other queries the mean value.
  total = jnp.maximum(mask.sum(1), 1)[:, None, None]
  mean = jnp.where(mask[:, None, :, None], wide(v), 0).sum(2)
  mean = (mean / total.astype(mean.dtype)).astype(v.dtype)
  y = jnp.broadcast_to(mean[:, :, None], v.shape)
  # Write the rows of the selected queries into the output.
  put = jax.vmap(jax.vmap(lambda y, i, r: y.at[i].set(r)))
  return put(y, top, rows)


def _sampled_keys(mask: jax.Array, place: jax.Array) -> jax.Array:
  """Returns positions of the sampled keys of every query, [b, n, samples].

  Args:
    mask: [b, n], True at tokens.
    place: fractions of the tokens in [0, 1), [n, samples].
  """
  rank = ranks(place[None], mask.sum(1)[:, None, None])
  # Token i takes row i of the samples; padding between tokens does not count.
  row = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
  rank = jnp.take_along_axis(rank, row[..., None], 1)
  return jnp.take_along_axis(tokens_first(mask)[:, None], rank, 2)


def _measure(q: jax.Array, k: jax.Array, index: jax.Array) -> jax.Array:
  """Returns max_s q . k_s - mean_s q . k_s over sampled keys, f32 [b, h, n].

  Loops over the samples, since an array [n, samples, e] would be the largest
  array of the model.

  Args:
    q, k: queries and keys, [b, h, n, e].
    index: positions of the sampled keys, [b, n, samples].
  """
  q, k = wide(q), wide(k)
  if platforms.on_tpu():
    return _measure_by_blocks(q, k, index)

  # The carry is the maximum and the sum over the samples so far.
  def add(
    past: tuple[jax.Array, jax.Array], index: jax.Array
  ) -> tuple[tuple[jax.Array, jax.Array], None]:
    most, total = past
    chosen = jnp.take_along_axis(k, index[:, None, :, None], 2)
    score = (q * chosen).sum(-1)
    return (jnp.maximum(most, score), total + score), None

  start = jnp.full_like(q[..., 0], -jnp.inf), jnp.zeros_like(q[..., 0])
  (most, total), _ = jax.lax.scan(add, start, jnp.moveaxis(index, 2, 0))
  return most - total / index.shape[2]


def _measure_by_blocks(
  q: jax.Array, k: jax.Array, index: jax.Array
) -> jax.Array:
  """Returns `_measure` from all products of a block of queries with the keys.

  A TPU reads single keys slowly: by the compiler's cycles, the loop over the
  samples takes twelve times as long for 2,000 tokens.
  """
  b, h, n, _ = q.shape

  def measure(block: tuple[jax.Array, jax.Array]) -> jax.Array:
    q, index = block  # [b, h, m, e] and [b, m, samples].
    scores = jnp.einsum("bhie,bhje->bhij", q, k, precision=HIGHEST)
    # How often query i samples key j, [b, m, n]: with j = DIGIT j' + j'', a
    # product of the digits' one-hot codes over the samples.
    high, low = jnp.divmod(index, DIGIT)
    digits = jax.nn.one_hot(high, -(-n // DIGIT)), jax.nn.one_hot(low, DIGIT)
    count = jnp.einsum("bmsi,bmsj->bmij", *digits)
    count = count.reshape(*index.shape[:2], -1)[:, None, :, :n]
    most = jnp.where(count > 0, scores, -jnp.inf).max(-1)
    return most - (scores * count).sum(-1) / index.shape[2]

  # Pad the queries to whole blocks.
  length = min(BLOCK, n)
  blocks = jax.tree.map(
    lambda x, axis: jnp.moveaxis(split(x, length, axis), axis, 0),
    (q, index),
    (2, 1),
  )
  y = jnp.moveaxis(jax.lax.map(measure, blocks), 0, 2)
  return y.reshape(b, h, -1)[..., :n]
