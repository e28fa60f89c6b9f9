"""Local attention: every block of the sequence attends to itself."""

from __future__ import annotations

import jax

from jaxformers.foundations.ranges import Size
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

MODELS.register("local")(Variant("local"))


@attention("local")
def local(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  block_size: Size = 64,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention of every block to itself, in blocks of `block_size`.

  Source: Tay et al. 2021, https://arxiv.org/abs/2011.04006 (LRA), "Local
  Attention"; block_size is 50 there, 64 on images. Equals softmax attention
  with one block.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Mask padding and, if causal, later tokens of the block.
  size = check_size("block_size", block_size)
  seen = split(mask, size, 1)[:, None, :, None]  # [b, 1, B, 1, s]
  if causal:
    seen = seen & earlier(size)[None, None, None]
  # Attend within every block.
  q, k, v = (split(a, size) for a in (q, k, v))
  return merge(attend_to(q, [Keys(k, v, seen)], dropout), mask.shape[1])
