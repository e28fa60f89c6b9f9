"""Reformer: tokens attend to tokens in the same bucket of a hash."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Length, OptionalSize, Size, SmallCount
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import check_size, neighbours, split
from jaxformers.models.mixers.scores import HIGHEST, dot, hide
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("reformer")(Variant("reformer"))

# Score of a token for itself: it counts only if the token sees no other key.
ITSELF = -1e5


def buckets_of(
  q: jax.Array, rotations: jax.Array, factors: Sequence[int]
) -> jax.Array:
  """Returns the bucket argmax [q R, -q R] of each token, int32 [b, h, r, n].

  Args:
    q: shared queries and keys, [b, h, n, e].
    rotations: random matrices R of r rounds, [h, e, r, sum of factors / 2].
    factors: even numbers whose product is the number of buckets. Each factor
      has its own argmax, so that many buckets need few products.
  """
  # Each factor contributes one digit of the bucket's number.
  bucket: Any = 0  # `bucket` is an array after the first factor.
  start = 0
  for factor in factors:
    part = rotations[..., start : start + factor // 2]
    turned = jnp.einsum("bhne,hert->bhrnt", wide(q), part, precision=HIGHEST)
    digit = jnp.argmax(jnp.concatenate([turned, -turned], -1), -1)
    bucket, start = bucket * factor + digit, start + factor // 2
  return bucket


def _num_buckets(num_buckets: int, max_len: int, chunk_size: int) -> int:
  """Returns the number of buckets; by default about two per chunk."""
  if num_buckets < 0 or (num_buckets > 1 and num_buckets % 2):
    raise UserError(
      f"num_buckets={num_buckets}: give an even number, 1 for no hashing, or 0 "
      "for two buckets per chunk."
    )
  default = 2 ** max(1, int(math.log2(max(2 * max_len / chunk_size, 2))))
  return num_buckets or default


def factors_of(count: int, most: int = 128) -> tuple[int, ...]:
  """Returns a number of buckets as one factor, or as two even factors.

  Args:
    count: number of buckets.
    most: greatest number of buckets of one argmax.

  Raises:
    UserError: if `count` is above `most` and not divisible by twice the first
      factor, a power of two near the root of `count`.
  """
  if count <= most:
    return (count,)
  first = 2 ** math.ceil(math.log2(count) / 2)
  if count % (2 * first):
    raise UserError(f"num_buckets={count}: above {most} give a power of two.")
  return first, count // first


@attention("reformer", growth="n log n", redraw=True)
def reformer(
  q: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  draw: Callable[..., jax.Array],
  max_len: Length,
  chunk_size: Size = 64,
  num_hashes: SmallCount = 2,
  num_buckets: OptionalSize = 0,
  same_bucket: bool = True,
  correct_duplicates: bool = True,
) -> jax.Array:
  """LSH attention with shared queries and keys: k_j = q_j / |q_j|.

  In each of `num_hashes` rounds tokens are sorted by bucket and position, and
  cut into chunks. A token attends to the tokens of its bucket in its chunk and
  in the chunk before. A token attends to itself only if it sees no other token.
  One softmax covers the union of the keys that the rounds reach. |q_j|^2 is the
  sum of squares plus 1e-6 e, as in Hugging Face's code.

  Source: Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, section 2 and
  equations 3 to 8. Hugging Face's code, which Skyformer ran, attends across
  buckets (`same_bucket=False`) and counts a key once for every round that
  reaches it (`correct_duplicates=False`). Differs from paper and code, where
  the last chunk precedes the first chunk; here no chunk does. Padding changes
  nothing here, because the number of buckets depends on max_len and padding is
  sorted behind the tokens. No causal form: later tokens decide where chunks
  end. Equals softmax attention with one bucket and shared queries and keys.

  Shapes: q, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens. `draw`
  returns "rotations", [h, e, num_hashes, num_buckets / 2]; for many buckets the
  last axis is half the sum of two factors, see `factors_of`.
  """
  size = check_size("chunk_size", chunk_size)
  if num_hashes < 1:
    raise UserError(f"num_hashes={num_hashes} is below 1: give 1 or more.")
  b, h, n, e = q.shape
  # Hash the tokens. Padding gets an extra bucket after the others.
  count = _num_buckets(num_buckets, max_len, size)
  bucket = jnp.zeros((b, h, num_hashes, n), jnp.int32)
  if count > 1:
    # Hugging Face's code has this limit: 128 for chunks of 64.
    limit = 2 * max(math.isqrt(max_len // size), size)
    factors = factors_of(count, limit)
    shape = (h, e, num_hashes, sum(factors) // 2)
    rotations = draw("rotations", lambda key: jax.random.normal(key, shape))
    bucket = buckets_of(jax.lax.stop_gradient(q), rotations, factors)
  bucket = jnp.where(mask[:, None, None], bucket, count)
  # Sort tokens by bucket.
  order = jnp.argsort(bucket, axis=-1, stable=True)  # [b, h, r, n]
  rank = jnp.argsort(order, axis=-1)

  def cut(x: jax.Array) -> jax.Array:
    """Sorts x [b, h, n, ..] and cuts it into chunks: [b, h r, B, s, ..]."""
    index = order.reshape(*order.shape, *[1] * (x.ndim - 3))
    y = jnp.take_along_axis(x[:, :, None], index, axis=3)
    return split(y.reshape(b, h * num_hashes, n, *x.shape[3:]), size)

  def restore(x: jax.Array) -> jax.Array:
    """Inverts `cut`: [b, h r, B, s, f] -> [b, h, r, n, f]."""
    x = x.reshape(b, h, num_hashes, -1, x.shape[-1])
    return jnp.take_along_axis(x, rank[..., None], axis=3)

  # Score the keys of each chunk and of the chunk before.
  norm = jnp.sqrt(jnp.square(wide(q)).sum(-1, keepdims=True) + 1e-6 * e)
  k = (wide(q) / norm).astype(q.dtype)
  scores = dot(cut(q), _with_previous(cut(k)))
  # Mask keys that are padding or that the round does not reach.
  tokens = jnp.broadcast_to(mask[:, None], (b, h, n))
  seen = _with_previous(cut(tokens))[..., None, :]
  buckets, chunks = (
    cut(jnp.moveaxis(a, 2, -1))  # All rounds of a token: [b, h, n, r].
    for a in (bucket, rank // size)
  )
  reached = _reached(buckets, chunks, same_bucket)
  is_round = jnp.tile(jnp.eye(num_hashes, dtype=bool), (h, 1))
  seen = seen & (reached & is_round[None, :, None, None, None]).any(-1)
  # Divide the weight of a key by the number of rounds that reach it.
  if correct_duplicates:
    duplicates = jnp.maximum(reached.sum(-1), 1).astype(scores.dtype)
    scores = scores - jnp.log(duplicates)
  # Lower the score of a token for itself. Positions start at 1; 0 is padding.
  position = jnp.broadcast_to(jnp.arange(1, n + 1)[None, None], (b, h, n))
  position = cut(position)
  is_itself = position[..., None] == _with_previous(position)[..., None, :]
  scores = jnp.where(is_itself, ITSELF, scores)
  scores = hide(scores, seen)
  # Attend in each round, then weigh the rounds by their softmax denominators.
  total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
  weights = dropout(jnp.exp(scores - total)).astype(v.dtype)
  y = jnp.matmul(weights, _with_previous(cut(v)))
  share = jax.nn.softmax(restore(total), axis=2)
  return (share * wide(restore(y))).sum(2).astype(v.dtype)


def _with_previous(x: jax.Array) -> jax.Array:
  """Prepends to each chunk the chunk before it: s -> 2 s tokens."""
  return neighbours(x, 1, 0, 2)


def _reached(
  bucket: jax.Array, chunk: jax.Array, same_bucket: bool
) -> jax.Array:
  """Returns True where a query reaches a key in a round.

  Args:
    bucket, chunk: bucket and chunk of each query in all rounds,
      [b, h r, B, s, r].
    same_bucket: True if a key must be in the bucket of its query.

  Returns:
    A mask for each round, bool [b, h r, B, s, 2 s, r].
  """

  def pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[..., None, :], _with_previous(x)[..., None, :, :]

  # A query reaches the keys of its chunk and of the chunk before.
  query, key = pair(chunk)
  is_near = (query == key) | (query == key + 1)
  if same_bucket:
    query, key = pair(bucket)
    is_near = is_near & (query == key)
  return is_near
