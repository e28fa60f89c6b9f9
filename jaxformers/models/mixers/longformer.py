"""Longformer: a sliding window and a few global tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, OptionalSize
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import (
  Keys,
  attend_to,
  merge,
  neighbours,
  split,
)
from jaxformers.models.mixers.scores import earlier
from jaxformers.models.variants import MODELS, Variant

MODELS.register("longformer")(Variant("longformer"))


@attention("longformer")
def longformer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  project: Callable[[str], jax.Array],
  window: Annotated[int, Interval("[2, 2^20]")] = 128,
  num_global: OptionalSize = 1,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention to window / 2 tokens on each side and to global tokens.

  The first `num_global` positions are global; with num_global=1 this is the
  class token, if there is one. All tokens see the global tokens, and the global
  tokens see all tokens through separate projections. `causal` leaves out the
  right half of the window.

  Source: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150, section 3.1,
  where the window is 512. Equals softmax attention when the window covers all
  tokens. Differs from LRA, which has no global tokens and masks a dense n x n
  product.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  if window < 2 or window % 2:
    raise UserError(
      f"window={window}: half of the window lies on each side of a token. Give "
      "an even number of at least 2."
    )
  if num_global < 0:
    raise UserError(f"num_global={num_global} is negative: give 0 or more.")
  g = min(num_global, mask.shape[1])
  y = _attend_locally(q, k, v, mask, dropout, window // 2, g, causal)
  if not num_global:
    return y
  # Replace the rows of the global tokens, which see all tokens.
  q, k, v = (project(f"{name}_global") for name in ("query", "key", "value"))
  seen = mask[:, None, None]
  if causal:
    seen = seen & earlier(g, mask.shape[1])[None, None]
  # The local attention has folded the dropout key with 0 and 1.
  rows = attend_to(q[:, :, :g], [Keys(k, v, seen)], dropout.fold(2))
  return jnp.concatenate([rows, y[:, :, g:]], 2)


def _attend_locally(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  dropout: Dropout,
  size: int,
  num_global: int,
  causal: bool,
) -> jax.Array:
  """Attends to `size` tokens on each side and to the first `num_global`."""
  n, g = mask.shape[1], num_global
  # See the tokens of the window that are not global.
  band = split(mask & (jnp.arange(n) >= g)[None], size, 1)
  band = neighbours(band, 1, 1, 1)[:, None, :, None]
  # offset is the position of a key minus the position of its query.
  offset = jnp.arange(3 * size)[None] - size - jnp.arange(size)[:, None]
  near = (offset >= -size) & (offset <= (0 if causal else size))
  near_k, near_v = (neighbours(split(a, size), 1, 1, 2) for a in (k, v))
  keys = [Keys(near_k, near_v, band & near[None, None, None])]
  # See the global tokens.
  if g:
    seen = mask[:, None, None, None, :g]
    if causal:
      seen = seen & split(earlier(n, g), size, 0)[None, None]
    keys.append(Keys(k[:, :, None, :g], v[:, :, None, :g], seen))
  return merge(attend_to(split(q, size), keys, dropout), n)
