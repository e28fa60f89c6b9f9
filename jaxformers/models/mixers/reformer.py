"""Reformer: tokens attend to those in the same bucket of a hash."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention, wide
from jaxformers.models.mixers.blocked import check_size, neighbours, split
from jaxformers.models.mixers.softmax import HIGHEST, dot
from jaxformers.models.variants import MODELS, Variant

MODELS.register("reformer")(Variant("reformer"))

ITSELF = -1e5  # The logit of a token for itself: only if there is no other.


def buckets_of(
  q: jax.Array, rotations: jax.Array, factors: Sequence[int]
) -> jax.Array:
  """argmax [q R, -q R] -> int32 [b, h, r, n], for q [b, h, n, e].

  Args:
    rotations: [h, e, r, sum of the factors / 2].
    factors: even numbers whose product is the number of buckets; each is an
      argmax of its own, so that many buckets need few products.
  """
  bucket, at = 0, 0
  for factor in factors:
    part = rotations[..., at : at + factor // 2]
    turned = jnp.einsum("bhne,hert->bhrnt", wide(q), part, precision=HIGHEST)
    own = jnp.argmax(jnp.concatenate([turned, -turned], -1), -1)
    bucket, at = bucket * factor + own, at + factor // 2
  return bucket


def _num_buckets(asked: int, max_len: int, chunk_size: int) -> int:
  if asked < 0 or (asked > 1 and asked % 2):
    raise UserError(
      f"num_buckets={asked}: choose an even number, 1 for no hashing, or 0 for "
      "two to a chunk."
    )
  return asked or 2 ** max(1, int(math.log2(max(2 * max_len / chunk_size, 2))))


def factors_of(count: int, most: int = 128) -> tuple[int, ...]:
  """Returns a number of buckets as one factor, or as two even ones.

  Args:
    count: number of buckets.
    most: greatest number of buckets of one argmax.

  Raises:
    UserError: for a greater number that is no power of two.
  """
  if count <= most:
    return (count,)
  first = 2 ** math.ceil(math.log2(count) / 2)
  if count % (2 * first):
    raise UserError(f"num_buckets={count}: above {most} choose a power of two.")
  return first, count // first


@attention("reformer", redraw=True)
def reformer(
  q: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  draw: Callable[..., jax.Array],
  max_len: int,
  chunk_size: int = 64,
  num_hashes: int = 2,
  num_buckets: int = 0,
  same_bucket: bool = True,
  correct_duplicates: bool = True,
) -> jax.Array:
  """LSH attention with shared queries and keys: k_j = q_j / |q_j|.

  |q_j|^2 is the sum of squares plus 1e-6 e, as in Hugging Face's code.

  In each of `num_hashes` rounds tokens are sorted by bucket and position and
  cut into chunks; a token attends to those of its bucket in its own chunk and
  the one before, to itself only if there is no other. The rounds together are
  one softmax over the union of what they reach.

  Source: Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, section 2 and
  equations 3 to 8. Hugging Face's, which Skyformer ran, attends across buckets
  (`same_bucket=False`) and counts a key once for every round that reaches it
  (`correct_duplicates=False`). Differs from both: the first chunk has none
  before it, there the last; the number of buckets follows max_len and padding
  is sorted behind the tokens, so that it changes nothing. No causal form: where
  chunks end depends on later tokens too.

  Shapes: q, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens. `draw`
  gives "rotations": [h, e, num_hashes, num_buckets / 2]; of many buckets the
  last is half the sum of two factors, see `factors_of`.
  """
  size = check_size("chunk_size", chunk_size)
  if num_hashes < 1:
    raise UserError(f"num_hashes={num_hashes}: at least one is needed.")
  b, h, n, e = q.shape
  count = _num_buckets(num_buckets, max_len, size)
  bucket = jnp.zeros((b, h, num_hashes, n), jnp.int32)
  if count > 1:
    # The limit of Hugging Face's code: 128 for chunks of 64.
    limit = 2 * max(math.isqrt(max_len // size), size)
    factors = factors_of(count, limit)
    shape = (h, e, num_hashes, sum(factors) // 2)
    rotations = draw("rotations", lambda key: jax.random.normal(key, shape))
    bucket = buckets_of(jax.lax.stop_gradient(q), rotations, factors)
  bucket = jnp.where(mask[:, None, None], bucket, count)
  order = jnp.argsort(bucket, axis=-1, stable=True)  # [b, h, r, n]
  rank = jnp.argsort(order, axis=-1)

  def rounds(x: jax.Array) -> jax.Array:
    """x [b, h, n, ..] sorted and cut by every round: [b, h r, B, s, ..]."""
    index = order.reshape(*order.shape, *[1] * (x.ndim - 3))
    y = jnp.take_along_axis(x[:, :, None], index, axis=3)
    return split(y.reshape(b, h * num_hashes, n, *x.shape[3:]), size)

  def around(x: jax.Array) -> jax.Array:
    return neighbours(x, 1, 0, 2)

  norm = jnp.sqrt(jnp.square(wide(q)).sum(-1, keepdims=True) + 1e-6 * e)
  k = (wide(q) / norm).astype(q.dtype)
  places = jnp.broadcast_to(jnp.arange(1, n + 1)[None, None], (b, h, n))
  tokens = jnp.broadcast_to(mask[:, None], (b, h, n))
  scores = dot(rounds(q), around(rounds(k)))
  place = rounds(places)
  itself = place[..., None] == around(place)[..., None, :]
  seen = around(rounds(tokens))[..., None, :]
  # Bucket and chunk of a token in all rounds: [b, h, n, r].
  hashes = jnp.moveaxis(bucket, 2, -1)
  chunk = jnp.moveaxis(rank // size, 2, -1)
  reached = _reached(rounds(hashes), rounds(chunk), around, same_bucket)
  own = jnp.tile(jnp.eye(num_hashes, dtype=bool), (h, 1))
  seen = seen & (reached & own[None, :, None, None, None]).any(-1)
  if correct_duplicates:
    scores = scores - jnp.log(
      jnp.maximum(reached.sum(-1), 1).astype(scores.dtype)
    )
  scores = jnp.where(itself, ITSELF, scores)
  scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
  total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
  weights = dropout(jnp.exp(scores - total)).astype(v.dtype)
  y = jnp.matmul(weights, around(rounds(v)))

  def back(x: jax.Array) -> jax.Array:
    """Undoes `rounds`: [b, h r, B, s, f] -> [b, h, r, n, f]."""
    x = x.reshape(b, h, num_hashes, -1, x.shape[-1])
    return jnp.take_along_axis(x, rank[..., None], axis=3)

  share = jax.nn.softmax(back(total), axis=2)
  return (share * wide(back(y))).sum(2).astype(v.dtype)


def _reached(
  bucket: jax.Array,
  chunk: jax.Array,
  around: Callable[[jax.Array], jax.Array],
  same_bucket: bool,
) -> jax.Array:
  """Which rounds let a query see a key: bool [b, h r, B, s, 2 s, r].

  Args:
    bucket, chunk: [b, h r, B, s, r] of the queries.
    around: the keys of a block of queries.
    same_bucket: whether a key must be in the query's bucket.
  """

  def pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x[..., None, :], around(x)[..., None, :, :]

  mine, theirs = pairs(chunk)
  near = (mine == theirs) | (mine == theirs + 1)
  if same_bucket:
    mine, theirs = pairs(bucket)
    near = near & (mine == theirs)
  return near
