"""Sinkhorn attention: every block attends to itself and to a sorted block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import Factor, Interval, Length, Size
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import (
  check_size,
  merge,
  split,
  sum_values,
)
from jaxformers.models.mixers.scores import dot, hide
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("sinkhorn")(Variant("sinkhorn"))


def sort_weights(
  logits: jax.Array, filled: jax.Array, sort_steps: int
) -> jax.Array:
  """Returns Sinkhorn's normalisation of exp(logits), rows before columns.

  The rows and columns of blocks without tokens are 0, and are left out of the
  sums.

  Args:
    logits: float32 logits of pairs of blocks, [b, h, B, B].
    filled: bool [b, B], True for blocks with a token.
    sort_steps: number of times that rows and columns are normalised.
  """
  pairs = (filled[:, :, None] & filled[:, None])[:, None]
  log_p = hide(logits, pairs)
  # Normalise rows, then columns, in the logarithm.
  for _ in range(sort_steps):
    for axis in (-1, -2):
      total = jax.nn.logsumexp(log_p, axis=axis, keepdims=True)
      log_p = hide(log_p - total, pairs)
  return jnp.where(pairs, jnp.exp(log_p), 0)


@attention("sinkhorn")
def sinkhorn(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  param: Callable[..., Any],
  project: Callable[[str], jax.Array],
  max_len: Length,
  block_size: Size = 64,
  sort_steps: Annotated[int, Interval("[1, 100]")] = 5,
  temperature: Factor = 0.75,
) -> jax.Array:
  """Softmax attention to the query's block and to the block sorted to it.

  Each head sorts the B blocks of keys and values by a matrix P [B, B], whose
  rows and columns sum to 1: P is Sinkhorn's normalisation of R / `temperature`,
  with R_i = W_2 relu(sum of W_1 x over the tokens of block i). Place s of the
  block sorted to i holds the key sum_j P_ij k_js. If some blocks have padding
  at place s, the place holds the weighted mean over the other blocks, and the
  weight of this key in the softmax is multiplied by the sum of their P_ij. W_2
  has columns for the blocks of max_len tokens. P has (n / `block_size`)^2
  entries, which is at most n for up to block_size^2 tokens.

  Source: Tay et al. 2020, https://arxiv.org/abs/2002.11296 (Sparse Sinkhorn
  Attention), sections 3.1 to 3.3. Equals softmax attention with one block,
  where the sorted block is the block itself: every weight is there twice.
  Differs from the paper: no Gumbel noise, and the bias of W_1 counts once for
  every token. Differs from LRA's code (block_size 50, 64 on images), where a
  block is every (n / block_size)th token, sorted keys are the sum over all
  blocks, and the results of two softmaxes are added. No causal form: the sums
  over the columns of P see later blocks.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  size = check_size("block_size", block_size)
  tokens = split(mask, size, 1)  # [b, B, s]
  h, blocks, e = q.shape[1], tokens.shape[1], q.shape[-1]
  q, k, v, x = (split(a, size) for a in (q, k, v, project("sort")))
  # Sum the tokens of every block, and map the sums to logits of all blocks.
  at_tokens = tokens[:, None, :, :, None]
  sums = jnp.where(at_tokens, wide(x), 0).sum(3)  # [b, h, B, e]
  shape = (h, e, -(-max_len // size))
  kernel = param("sort_kernel", nn.initializers.normal(e**-0.5), shape)
  kernel = kernel[:, :, :blocks].astype(sums.dtype)
  logits = jnp.einsum("bhie,hej->bhij", jax.nn.relu(sums), kernel)
  p = sort_weights(logits / temperature, tokens.any(2), sort_steps)
  # Sum the weights P of the tokens at every place of a sorted block.
  share = jnp.einsum("bhij,bjs->bhis", p, tokens.astype(p.dtype))
  is_seen = share > 1e-6
  divisor = jnp.where(is_seen, share, 1)

  # Average the keys or values at every place, [b, h, B, s, e].
  def sort(a: jax.Array) -> jax.Array:
    a = jnp.where(at_tokens, wide(a), 0)
    y = jnp.einsum("bhij,bhjse->bhise", p, a.astype(p.dtype))
    return (y / divisor[..., None]).astype(v.dtype)

  # Attend to both blocks under one softmax.
  scale = e**-0.5
  near = hide(dot(q, k) * scale, tokens[:, None, :, None])
  sorted_scores = dot(q, sort(k)) * scale + jnp.log(divisor)[..., None, :]
  far = hide(sorted_scores, is_seen[..., None, :])
  y = sum_values([near, far], [v, sort(v)], dropout)
  return merge(y, mask.shape[1])
