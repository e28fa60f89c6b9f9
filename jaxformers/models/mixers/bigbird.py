"""Big Bird: attention to a window, two global blocks and random blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Length, OptionalSize, Size
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import (
  Keys,
  attend_to,
  check_size,
  merge,
  neighbours,
  split,
)
from jaxformers.models.variants import MODELS, Variant

MODELS.register("bigbird")(Variant("bigbird"))


def random_blocks(
  order: jax.Array, last: jax.Array, blocks: int, count: int
) -> tuple[jax.Array, jax.Array]:
  """Selects random blocks for every block, outside its window and not global.

  The selection depends on the last block of a sample with a token, not on its
  padding.

  Args:
    order: random priorities, float32 [h, B', B'] with B' >= blocks; a block
      takes the blocks of highest priority.
    last: index of the last block with a token, int32 [b].
    blocks: number of blocks B.
    count: number r of random blocks, at most B.

  Returns:
    Indices of blocks, int32 [b, h, B, r], and a mask of the same shape, True
    where an index is valid.
  """
  # Exclude the window, the first block, and the last block and those after it.
  i, j = jnp.arange(blocks)[:, None], jnp.arange(blocks)[None]
  free = (jnp.abs(i - j) > 1) & (j > 0)
  free = free[None] & (j[None] < last[:, None, None])
  priority = jnp.where(free[:, None], order[None, :, :blocks, :blocks], -1.0)
  priority, index = jax.lax.top_k(priority, count)
  return index, priority >= 0


@attention("bigbird")
def bigbird(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  draw: Callable[..., jax.Array],
  max_len: Length,
  block_size: Size = 64,
  num_random: OptionalSize = 3,
) -> jax.Array:
  """Softmax attention to neighbouring, global and random blocks.

  A block sees itself, the blocks before and after it, the first and the last
  block, and r = `num_random` other blocks, drawn for each head. The first and
  the last block see all tokens. A key that is reached in two ways counts once.

  Source: Zaheer et al. 2020, https://arxiv.org/abs/2007.14062, BigBird-ITC,
  section 2 and appendix D. Equals softmax attention when the random blocks are
  all blocks. Differs from their code and from Hugging Face's: the last block is
  the last with a token, not the last of the padding; every layer and head has
  its own graph; and no key counts twice. No causal form: the last block is
  global.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  size, (h, n) = check_size("block_size", block_size), q.shape[1:3]
  if num_random < 0:
    raise UserError(f"num_random={num_random} is negative: give 0 or more.")
  # Cut the sequence into blocks, and find the last one with a token.
  tokens = split(mask, size, 1)  # [b, B, s]
  blocks = tokens.shape[1]
  last = jnp.max(jnp.where(tokens.any(-1), jnp.arange(blocks)[None], 0), axis=1)
  q_blocks, k_blocks, v_blocks = (split(a, size) for a in (q, k, v))
  # Draw the random blocks.
  most = -(-max_len // size)
  order = draw("order", lambda key: jax.random.uniform(key, (h, most, most)))
  chosen = random_blocks(order, last, blocks, min(num_random, blocks))
  # Attend from every block.
  keys = _keys(k_blocks, v_blocks, tokens, last, *chosen)
  y = attend_to(q_blocks, keys, dropout)
  # Replace the rows of the first and the last block, which see all tokens.
  end = jnp.broadcast_to(last[:, None, None, None], (q.shape[0], h, 1, 1))
  pair = [q_blocks[:, :, :1], _take(q_blocks, end)]
  ends = jnp.concatenate(pair, 3)[:, :, 0]
  seen = Keys(k, v, mask[:, None, None])
  rows = attend_to(ends, [seen], dropout.fold(len(keys)))
  block = jnp.arange(blocks)[None]
  is_first, is_last = (
    is_end[:, None, :, None, None]
    for is_end in (block == 0, block == last[:, None])
  )
  y = jnp.where(is_last, rows[:, :, None, size:], y)
  y = jnp.where(is_first, rows[:, :, None, :size], y)
  return merge(y, n)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Gathers blocks of x [b, h, B, s, e] -> [b, h, i, j s, e].

  Args:
    x: blocks of tokens.
    index: indices of blocks, [b, h, i, j].
  """
  b, h, *_, e = x.shape
  flat = index.reshape(b, h, -1, 1, 1)
  taken = jnp.take_along_axis(x, flat, axis=2)
  return taken.reshape(b, h, index.shape[2], -1, e)


def _keys(
  k: jax.Array,
  v: jax.Array,
  tokens: jax.Array,
  last: jax.Array,
  index: jax.Array,
  is_valid: jax.Array,
) -> list[Keys]:
  """Returns the keys of every block: global, neighbouring and random ones.

  Args:
    k, v: keys and values, [b, h, B, s, e].
    tokens: mask of the tokens, [b, B, s].
    last: index of the last block with a token, [b].
    index: indices of the random blocks, [b, h, B, r].
    is_valid: True where an index is valid, [b, h, B, r].
  """
  b, h, blocks, size, _ = k.shape
  # Find the tokens of the last block, [b, h, 1, s].
  end = jnp.broadcast_to(last[:, None, None, None], (b, h, 1, 1))
  by_head = jnp.broadcast_to(
    tokens[:, None, ..., None], (b, h, blocks, size, 1)
  )
  # Use the last block only if it is not also the first.
  seen_last = _take(by_head, end)[..., 0] & (last > 0)[:, None, None, None]
  # Use neighbours only if they are not global.
  block = jnp.arange(blocks)[None]
  is_global = (block == 0) | (block == last[:, None])  # [b, B]
  band = neighbours(tokens & ~is_global[..., None], 1, 1, 1)
  # Use random blocks only if their index is valid.
  reached = _take(by_head, index)[..., 0] & jnp.repeat(is_valid, size, -1)
  return [
    Keys(k[:, :, :1], v[:, :, :1], tokens[:, None, :1, None]),
    Keys(_take(k, end), _take(v, end), seen_last[:, :, :, None]),
    Keys(
      neighbours(k, 1, 1, 2), neighbours(v, 1, 1, 2), band[:, None, :, None]
    ),
    Keys(_take(k, index), _take(v, index), reached[:, :, :, None]),
  ]
