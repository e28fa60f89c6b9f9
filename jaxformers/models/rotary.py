"""Rotary positions: queries and keys turned by their places.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.cache import count_tokens, is_decoding

ROTARY_BASE = 10_000.0  # Ratio of the fastest and slowest rotation.


def number_tokens(module: nn.Module, mask: jax.Array) -> jax.Array:
  """Returns the places of tokens, those in the cache counted, [b or 1, n]."""
  if not is_decoding(module):
    return jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
  return count_tokens(module, mask, "rotated")


def rotate(x: jax.Array, numbers: jax.Array) -> jax.Array:
  """Returns heads turned by their places, x [b, h, n, e].

  Args:
    x: queries or keys.
    numbers: places of the tokens, [b or 1, n].
  """
  half = x.shape[-1] // 2
  rates = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = numbers.astype(jnp.float32)[..., None] * rates[None, None]
  cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
  left, right = x[..., :half], x[..., half:]
  return jnp.concatenate(
    [left * cos - right * sin, right * cos + left * sin], -1
  )
