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


def masked_max_of_sum(
  x: jax.Array, a: jax.Array, f: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns `masked_max(x + a f, mask)`, [b, d], for a scalar a.

  The gradient of a needs f where the sum is greatest. On TPUs the forward pass
  keeps these entries [b, d], and the backward pass does not read f again.

  Args:
    x, f: arrays [b, n, d] of one dtype.
    a: scalar of this dtype.
    mask: bool [b, n], True at tokens.
  """
  if platforms.on_tpu():
    return _max_with_entries(x, a, f, mask)
  return masked_max(x + a * f, mask)


@jax.custom_jvp
def _max_with_entries(
  x: jax.Array, a: jax.Array, f: jax.Array, mask: jax.Array
) -> jax.Array:
  return masked_max(x + a * f, mask)


@_max_with_entries.defjvp
def _max_with_entries_jvp(
  primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
  (x, a, f, mask), (dx, da, df, _) = primals, tangents
  places = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)

  def larger(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    # NaN is greatest, and equal sums have the first place.
    is_left = (left[0] > right[0]) | jnp.isnan(left[0])
    is_left |= (left[0] == right[0]) & (left[1] < right[1])
    pairs = zip(left, right, strict=True)
    return tuple(jnp.where(is_left, a, b) for a, b in pairs)

  lowest = jnp.array(-jnp.inf, x.dtype), jnp.int32(0), jnp.zeros((), f.dtype)
  arrays = _fill_padding(x + a * f, mask), places, f
  top, position, entries = jax.lax.reduce(arrays, lowest, larger, (1,))

  def at_tokens(y: jax.Array) -> jax.Array:
    return jnp.where(mask.any(1)[:, None], y, 0)

  slope = jnp.take_along_axis(dx + a * df, position[:, None], 1)[:, 0]
  return at_tokens(top), at_tokens(slope + da * entries)


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
