"""Sums and maxima over the tokens of padded sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms

_BLOCK = 32  # Tokens per block in the search for the first maximum.


def wide(x: jax.Array) -> jax.Array:
  """Returns x in at least float32, for sums and exponentials."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_jvp
def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the maximum over the tokens of x [b, n, d], mask [b, n] -> [b, d].

  The result is 0 for a sample without tokens. If several tokens have the
  maximum, the gradient goes to the first one.
  """
  top = _fill_padding(x, mask).max(1)
  return jnp.where(mask.any(1)[:, None], top, 0)


@masked_max.defjvp
def _masked_max_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
  (x, mask), (dx, _) = primals, tangents
  # Differentiate through the position of the maximum. The gradient of `max`
  # compares x with its maximum. It would vanish where the compiler computes x
  # twice with different rounding.
  position = _first_argmax(_fill_padding(x, mask))

  def take(x: jax.Array) -> jax.Array:
    entries = jnp.take_along_axis(x, position[:, None], 1)[:, 0]
    return jnp.where(mask.any(1)[:, None], entries, 0)

  # A TPU would store an x that is a sum of other arrays to read its entries.
  top = masked_max(x, mask) if platforms.on_tpu() else take(x)
  return top, take(dx)


def _fill_padding(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns x [b, n, d] with the lowest number where mask [b, n] is False."""
  return jnp.where(mask[..., None], x, jnp.finfo(x.dtype).min)


def _first_argmax(x: jax.Array) -> jax.Array:
  """Returns the first position of the maximum of x [b, n, d] -> int [b, d].

  CPUs compute a maximum several times faster than its position. So on other
  devices than TPUs this function first finds the block with the maximum, and
  then the position inside the block.
  """
  b, n, d = x.shape
  if n % _BLOCK or platforms.on_tpu():
    return x.argmax(1)
  # Find the block with the maximum, then the position in it.
  blocks = x.reshape(b, n // _BLOCK, _BLOCK, d)
  block = blocks.max(2).argmax(1)
  tokens = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  return block * _BLOCK + tokens.argmax(1)


def largest(x: jax.Array) -> jax.Array:
  """Returns the maximum over the last axis of x [..., n] -> [...].

  The gradient goes to the first maximum, as in `masked_max`. It would be NaN
  with `max` where the compiler computes x twice with different rounding, since
  no entry would then equal the maximum.
  """
  position = jax.lax.stop_gradient(x).argmax(-1)
  return jnp.take_along_axis(x, position[..., None], -1)[..., 0]


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean over the tokens of x [b, n, d], mask [b, n] -> f32 [b, d].

  The result is 0 for a sample without tokens.
  """
  total = jnp.where(mask[..., None], x.astype(jnp.float32), 0).sum(1)
  return total / jnp.maximum(mask.sum(1), 1)[:, None].astype(jnp.float32)
