"""Sparse Transformer: attention with the fixed sparsity pattern."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import OptionalSize, Size
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import (
  Keys,
  attend_to,
  check_size,
  merge,
  split,
)
from jaxformers.models.mixers.scores import earlier
from jaxformers.models.variants import MODELS, Variant

MODELS.register("sparse")(Variant("sparse"))

GROUP = 4  # Blocks whose scores are in memory at a time.


@attention("sparse")
def sparse(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  block_size: Size = 64,
  num_summary: OptionalSize = 4,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention within a block, and to the last tokens of every block.

  Token i sees token j if both are in one block of l = `block_size` tokens, or
  if j is one of the last c = `num_summary` tokens of its block. Time grows as
  n (l + c n / l), which is n sqrt(n) with l near sqrt(n). The scores are
  computed block by block and not stored, so memory grows as n.

  Source: Child et al. 2019, https://arxiv.org/abs/1904.10509, the fixed pattern
  of section 4.3, its two sets merged in every head (section 5.2). Equals
  softmax attention with `num_summary` = `block_size`. Differs from the paper
  and LRA (l = 50, c = 10): causal only with `causal`.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  size = check_size("block_size", block_size)
  if not 0 <= num_summary <= size:
    raise UserError(
      f"num_summary={num_summary} is not in 0 to block_size={size}: give a "
      "number in that range."
    )
  attend = functools.partial(_attend, size, num_summary, causal)
  if not platforms.on_tpu():
    return attend((q, k, v, mask), dropout)
  # In a loop over blocks of all devices, these would exchange random numbers.
  rows = (q, k, v, mask, jnp.arange(len(q)))
  return platforms.by_device(
    lambda local, drop: attend(local[:4], drop.for_rows(local[4])),
    rows,
    dropout,
  )


def _attend(
  size: int, num_summary: int, causal: bool, inputs: Any, dropout: Dropout
) -> jax.Array:
  """Returns the result of `sparse` for `inputs`: q, k, v and the mask."""
  *heads, mask = inputs
  n, c = mask.shape[1], num_summary
  tokens = split(mask, size, 1)  # [b, B, s]
  q, k, v = (split(a, size) for a in heads)
  b, h, blocks, *_ = k.shape
  # Collect the summary, the last c tokens of every block, for all queries.
  last_k, last_v = (
    a[:, :, :, size - c :].reshape(b, h, 1, -1, a.shape[-1]) for a in (k, v)
  )
  summary = tokens[:, :, size - c :]  # [b, B, c]

  @jax.checkpoint
  def attend_block(
    i: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, tokens: jax.Array
  ) -> jax.Array:
    # See the block itself, and the summaries of the other blocks.
    inside = tokens[:, None, None, None]
    if causal:
      inside = inside & earlier(size)[None, None, None]
    others = jnp.arange(blocks) < i if causal else jnp.arange(blocks) != i
    outside = (summary & others[None, :, None]).reshape(b, 1, 1, 1, -1)
    keys = [
      Keys(k[:, :, None], v[:, :, None], inside),
      Keys(last_k, last_v, outside),
    ]
    return attend_to(q[:, :, None], keys, dropout.fold(i))[:, :, 0]

  # Loop over the blocks, so that only GROUP blocks of scores exist at a time.
  parts = [jnp.moveaxis(a, 2, 0) for a in (q, k, v)]
  # Number the blocks, so that each has its own dropout mask.
  y = jax.lax.map(
    lambda part: attend_block(*part),
    (jnp.arange(blocks), *parts, jnp.moveaxis(tokens, 1, 0)),
    batch_size=GROUP,
  )
  return merge(jnp.moveaxis(y, 0, 2), n)
