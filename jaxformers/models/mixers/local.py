"""Local attention: within blocks of the sequence."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxformers.models.attention import attention
from jaxformers.models.mixers.blocked import (
  Keys,
  attend_to,
  check_size,
  merge,
  split,
)
from jaxformers.models.mixers.softmax import earlier
from jaxformers.models.variants import MODELS, Variant

MODELS.register("local")(Variant("local"))


@attention("local")
def local(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  block_size: int = 64,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention of every block to itself, blocks counted from the start.

  Source: Tay et al. 2021 (LRA), https://arxiv.org/abs/2011.04006, "Local
  Attention"; block_size is 50 there, 64 on images.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  size = check_size("block_size", block_size)
  own = split(mask, size, 1)[:, None, :, None]
  seen = own & earlier(size)[None, None, None] if causal else own
  q, k, v = (split(a, size) for a in (q, k, v))
  return merge(attend_to(q, [Keys(k, v, seen)], dropout), mask.shape[1])
