"""Informer: the queries that matter attend, the others take the mean."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention, wide
from jaxformers.models.mixers.landmarks import ranks, tokens_first
from jaxformers.models.mixers.softmax import dot, weigh
from jaxformers.models.variants import MODELS, Variant

MODELS.register("informer")(Variant("informer"))


@attention("informer", redraw=True)
def informer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  draw: Callable[..., jax.Array],
  max_len: int,
  factor: float = 5.0,
  num_queries: int = 0,
  num_samples: int = 0,
) -> jax.Array:
  """ProbSparse attention: softmax rows for u queries, the mean of v elsewhere.

  A query's measure is the maximum less the mean of q . k / sqrt(e) over sampled
  keys. The u = `num_queries` queries of greatest measure attend to all tokens;
  0 stands for ceil(factor ln max_len), as for the `num_samples` keys drawn with
  replacement for every query.

  Source: Zhou et al. 2021, https://arxiv.org/abs/2012.07436, equations 2 to 4
  and algorithm 1. Differs from their code and Skyformer's: padding is no key,
  no query and not in the mean; the mean of the measure is over the samples,
  there their sum over n; counts follow max_len, so that padding changes
  nothing; a draw is kept in evaluation. No causal form: which queries matter
  depends on all of them.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  `draw` gives "samples": [max_len, num_samples] in [0, 1), a fraction of the
  tokens.
  """
  if factor <= 0 or num_queries < 0 or num_samples < 0:
    raise UserError(
      f"factor={factor}, num_queries={num_queries}, num_samples={num_samples}: "
      "choose a positive factor, and counts above 0 or 0 to follow it."
    )
  if num_queries > max_len:
    raise UserError(
      f"num_queries={num_queries} is above max_len={max_len}: choose fewer."
    )
  n, follow = mask.shape[1], math.ceil(factor * math.log(max_len))
  count = min(num_queries or max(1, follow), n)
  samples = num_samples or max(1, follow)
  place = draw(
    "samples", lambda key: jax.random.uniform(key, (max_len, samples))
  )[:n]
  total = mask.sum(1)[:, None, None]
  rank = ranks(place[None], total)  # [b, n, samples]
  # The i-th token's samples, wherever padding stands between the tokens.
  own = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
  rank = jnp.take_along_axis(rank, own[..., None], 1)
  index = jnp.take_along_axis(tokens_first(mask)[:, None], rank, 2)
  scale = q.shape[-1] ** -0.5
  measure = jax.lax.stop_gradient(_measure(q * scale, k, index))
  measure = jnp.where(mask[:, None], measure, -jnp.inf)
  top = jax.lax.top_k(measure, count)[1]  # [b, h, count]
  best = jnp.take_along_axis(q, top[..., None], 2)
  weights = weigh(dot(best, k) * scale, mask[:, None, None])
  rows = jnp.matmul(dropout(weights).astype(v.dtype), v)
  mean = jnp.where(mask[:, None, :, None], wide(v), 0).sum(2)
  mean = (mean / jnp.maximum(total, 1).astype(mean.dtype)).astype(v.dtype)
  y = jnp.broadcast_to(mean[:, :, None], v.shape)
  put = jax.vmap(jax.vmap(lambda y, i, r: y.at[i].set(r)))
  return put(y, top, rows)


def _measure(q: jax.Array, k: jax.Array, index: jax.Array) -> jax.Array:
  """max_s q . k_s - mean_s q . k_s over sampled keys -> float32 [b, h, n].

  One sample of all queries at a time: [n, samples, e] would be the largest
  array of the model.

  Args:
    q, k: [b, h, n, e].
    index: [b, n, samples], positions of keys.
  """
  q, k = wide(q), wide(k)

  def add(
    so_far: tuple[jax.Array, jax.Array], index: jax.Array
  ) -> tuple[tuple[jax.Array, jax.Array], None]:
    most, total = so_far
    chosen = jnp.take_along_axis(k, index[:, None, :, None], 2)
    score = (q * chosen).sum(-1)
    return (jnp.maximum(most, score), total + score), None

  start = jnp.full_like(q[..., 0], -jnp.inf), jnp.zeros_like(q[..., 0])
  (most, total), _ = jax.lax.scan(add, start, jnp.moveaxis(index, 2, 0))
  return most - total / index.shape[2]
