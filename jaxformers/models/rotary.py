"""Rotary positions: rotations of queries and keys by their positions.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.cache import count_tokens, is_decoding
from jaxformers.models.segments import is_packed, places

ROTARY_BASE = 10_000.0  # Ratio of the fastest and slowest rotation.


def number_tokens(module: nn.Module, mask: jax.Array) -> jax.Array:
  """Returns the positions of tokens, after those in a cache, [b or 1, n].

  Positions begin again in each example of a packed row.
  """
  if not is_decoding(module):
    if is_packed(mask):
      return places(mask)
    return jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
  return count_tokens(module, mask, "rotated")


def rotate(x: jax.Array, numbers: jax.Array) -> jax.Array:
  """Returns heads rotated by angles proportional to their positions.

  Channels i and i + e / 2 are rotated by the angle p 10000^(-2i / e), where p
  is the position.

  Args:
    x: queries or keys, [b, h, n, e].
    numbers: positions p of the tokens, [b or 1, n].
  """
  # Compute cosines and sines of all angles, [b or 1, 1, n, e / 2].
  half, dtype = x.shape[-1] // 2, jnp.promote_types(x.dtype, jnp.float32)
  rates = ROTARY_BASE ** (-jnp.arange(half, dtype=dtype) / half)
  angles = numbers.astype(dtype)[..., None] * rates[None, None]
  cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
  # Rotate the pairs (left, right).
  left, right = x[..., :half], x[..., half:]
  return jnp.concatenate(
    [left * cos - right * sin, right * cos + left * sin], -1
  )
