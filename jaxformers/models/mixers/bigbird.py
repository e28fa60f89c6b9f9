"""Big Bird: a window, global blocks and random blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention
from jaxformers.models.mixers.blocked import (
  Keys,
  attend_to,
  check_size,
  merge,
  neighbours,
  split,
)
from jaxformers.models.mixers.softmax import dot, weigh
from jaxformers.models.variants import MODELS, Variant

MODELS.register("bigbird")(Variant("bigbird"))


def random_blocks(
  order: jax.Array, last: jax.Array, blocks: int, count: int
) -> tuple[jax.Array, jax.Array]:
  """Random blocks for every block, none of them in its window or global.

  A sample's draw depends on its last block, not on the padding behind it.

  Args:
    order: float32 [h, B', B'], B' >= blocks; a block takes those of highest
      value.
    last: int32 [b], index of the last block with a token.
    blocks: B.
    count: r, at most B.

  Returns:
    Indices, int32 [b, h, B, r], and which of them count, bool.
  """
  i, j = jnp.arange(blocks)[:, None], jnp.arange(blocks)[None]
  free = (jnp.abs(i - j) > 1) & (j > 0)
  free = free[None] & (j[None] < last[:, None, None])
  value = jnp.where(free[:, None], order[None, :, :blocks, :blocks], -1.0)
  value, index = jax.lax.top_k(value, count)
  return index, value >= 0


@attention("bigbird")
def bigbird(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  draw: Callable[..., jax.Array],
  max_len: int,
  block_size: int = 64,
  num_random: int = 3,
) -> jax.Array:
  """Softmax attention to the neighbouring, the global and random blocks.

  A block sees itself, the one before and behind it, the first block, the last
  block and r = `num_random` others of each head's graph; the first and the last
  see all. A key that is reached in two ways counts once.

  Source: Zaheer et al. 2020, https://arxiv.org/abs/2007.14062, BigBird-ITC,
  section 2 and appendix D. Differs from their code and from Hugging Face's: the
  last block is the last with a token, not the last of the padding; every layer
  and head has a graph of its own; and nothing counts twice. There is no causal
  form: the last block is in the future of all others.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  size, n = check_size("block_size", block_size), mask.shape[1]
  if num_random < 0:
    raise UserError(f"num_random={num_random}: 0 or more blocks are random.")
  own = split(mask, size, 1)  # [b, B, s]
  b, blocks, _ = own.shape
  h = q.shape[1]
  at = jnp.arange(blocks)
  last = jnp.max(jnp.where(own.any(-1), at[None], 0), axis=1)  # [b]
  every = -(-max_len // size)
  order = draw("order", lambda key: jax.random.uniform(key, (h, every, every)))
  index, chosen = random_blocks(order, last, blocks, min(num_random, blocks))
  q_blocks, k_blocks, v_blocks = (split(a, size) for a in (q, k, v))

  def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [b, h, B, s, e] by index [b, h, i, j] -> [b, h, i, j s, e]."""
    shape = (*index.shape[:3], -1, x.shape[-1])
    flat = index.reshape(*index.shape[:2], -1, 1, 1)
    flat = jnp.broadcast_to(flat, (b, h, *flat.shape[2:]))
    return jnp.take_along_axis(x, flat, axis=2).reshape(shape[0], h, *shape[2:])

  end = jnp.broadcast_to(last[:, None, None, None], (b, h, 1, 1))
  globals_ = (at[None] == 0) | (at[None] == last[:, None])  # [b, B]
  band = neighbours(own & ~globals_[..., None], 1, 1, 1)
  own_heads = jnp.broadcast_to(own[:, None, ..., None], (b, h, blocks, size, 1))
  reached = take(own_heads, index)[..., 0] & jnp.repeat(chosen, size, -1)
  last_seen = take(own_heads, end)[..., 0] & (last > 0)[:, None, None, None]
  keys = [
    Keys(k_blocks[:, :, :1], v_blocks[:, :, :1], own[:, None, :1, None]),
    Keys(take(k_blocks, end), take(v_blocks, end), last_seen[:, :, :, None]),
    Keys(
      neighbours(k_blocks, 1, 1, 2),
      neighbours(v_blocks, 1, 1, 2),
      band[:, None, :, None],
    ),
    Keys(take(k_blocks, index), take(v_blocks, index), reached[:, :, :, None]),
  ]
  y = attend_to(q_blocks, keys, dropout)
  # The two global blocks see all.
  ends = jnp.concatenate([q_blocks[:, :, :1], take(q_blocks, end)], 3)[:, :, 0]
  weights = weigh(dot(ends, k) / q.shape[-1] ** 0.5, mask[:, None, None])
  dense = jnp.matmul(dropout(weights).astype(v.dtype), v)
  is_last = (at[None] == last[:, None])[:, None, :, None, None]
  y = jnp.where(is_last, dense[:, :, None, size:], y)
  y = jnp.where(
    (at == 0)[None, None, :, None, None], dense[:, :, None, :size], y
  )
  return merge(y, n)
