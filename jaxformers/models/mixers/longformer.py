"""Longformer: a sliding window, and a few tokens that see and are seen."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention
from jaxformers.models.mixers.blocked import (
  Keys,
  attend_to,
  merge,
  neighbours,
  split,
)
from jaxformers.models.mixers.softmax import dot, earlier, weigh
from jaxformers.models.variants import MODELS, Variant

MODELS.register("longformer")(Variant("longformer"))


@attention("longformer")
def longformer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  project: Callable[[str], jax.Array],
  window: int = 128,
  num_global: int = 1,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention to window / 2 tokens on each side and to global ones.

  The first `num_global` positions (one: the class token, if there is one) are
  seen by all, and see all, by projections of their own.

  Source: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150, section 3.1.
  There the window is 512. Differs from LRA, which has no global tokens and
  masks a dense n x n product. With `causal` the right half of the window goes.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  n = mask.shape[1]
  if window < 2 or window % 2:
    raise UserError(
      f"window={window}: half of it is on each side; choose an even number."
    )
  if num_global < 0:
    raise UserError(f"num_global={num_global}: 0 or more tokens are global.")
  size, g = window // 2, min(num_global, n)
  band = split(mask & (jnp.arange(n) >= g)[None], size, 1)
  band = neighbours(band, 1, 1, 1)[:, None, :, None]
  offset = jnp.arange(3 * size)[None] - size - jnp.arange(size)[:, None]
  near = (offset >= -size) & (offset <= (0 if causal else size))
  q_blocks = split(q, size)
  around = [neighbours(split(a, size), 1, 1, 2) for a in (k, v)]
  keys = [Keys(*around, band & near[None, None, None])]
  if g:
    seen = mask[:, None, None, None, :g]
    if causal:
      seen = seen & split(earlier(n, g), size, 0)[None, None]
    keys.append(Keys(k[:, :, None, :g], v[:, :, None, :g], seen))
  y = merge(attend_to(q_blocks, keys, dropout), n)
  if not num_global:
    return y
  q, k, v = (project(f"{name}_global") for name in ("query", "key", "value"))
  seen = mask[:, None, None]
  if causal:
    seen = seen & earlier(g, n)[None, None]
  weights = weigh(dot(q[:, :, :g], k) / q.shape[-1] ** 0.5, seen)
  top = jnp.matmul(dropout(weights).astype(v.dtype), v)
  return jnp.concatenate([top, y[:, :, g:]], 2)
