"""What the maps are made of: matrix products at full precision, no LAPACK.

LAPACK's factorisations are slow on accelerators, and inside some programs can
hang for good on CPUs with few cores. All of this works on [..., d, d].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST
_SMALL = 32  # Where products of blocks no longer pay.


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
  """a @ b at the full precision of its type, on accelerators too."""
  return jnp.matmul(a, b, precision=_HIGHEST)


def transpose(a: jax.Array) -> jax.Array:
  """The last two axes exchanged."""
  return jnp.swapaxes(a, -1, -2)


def eye_like(a: jax.Array) -> jax.Array:
  """The identity in the shape and type of a."""
  return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def _sweep(m: jax.Array) -> jax.Array:
  """The inverse of m [k, d, d], small, by Gauss-Jordan elimination."""

  def eliminate(i: jax.Array, m: jax.Array) -> jax.Array:
    row = jax.lax.dynamic_slice_in_dim(m, i, 1, 1)
    column = jax.lax.dynamic_slice_in_dim(m, i, 1, 2)
    pivot = 1 / jax.lax.dynamic_slice_in_dim(row, i, 1, 2)
    row = jax.lax.dynamic_update_slice_in_dim(row * pivot, pivot, i, 2)
    column = jax.lax.dynamic_update_slice_in_dim(
      column, -jnp.ones_like(pivot), i, 1
    )
    m = jax.lax.dynamic_update_slice_in_dim(m, jnp.zeros_like(column), i, 2)
    m = jax.lax.dynamic_update_slice_in_dim(m, jnp.zeros_like(row), i, 1)
    return m - column * row

  return jax.lax.fori_loop(0, m.shape[-1], eliminate, m)


@functools.partial(jax.jit, inline=True)
def _halves(m: jax.Array) -> jax.Array:
  """The inverse of m [k, d, d] by that of a quarter and its Schur complement.

  There is no pivoting, so the symmetric part of m must be positive definite;
  then so are those of the two. Under jit for its cache alone: each size is
  traced once, and not once for every block of every matrix.
  """
  d = m.shape[-1]
  if d <= _SMALL:
    return _sweep(m)
  h = -(-d // (2 * _SMALL)) * _SMALL  # Whole blocks, and half of them at least.
  a, b, c, e = m[:, :h, :h], m[:, :h, h:], m[:, h:, :h], m[:, h:, h:]
  a = _halves(a)
  right, below = dot(a, b), dot(c, a)
  e = _halves(e - dot(c, right))
  corner = dot(e, below)
  top = jnp.concatenate([a + dot(right, corner), -dot(right, e)], 2)
  return jnp.concatenate([top, jnp.concatenate([-corner, e], 2)], 1)


@jax.custom_jvp
def inverse(m: jax.Array) -> jax.Array:
  """The inverse of m [..., d, d]; its gradient reuses it.

  Only for matrices whose symmetric part is positive definite, such as I - s
  with s skew-symmetric.
  """
  return _halves(m.reshape((-1, *m.shape[-2:]))).reshape(m.shape)


@inverse.defjvp
def _inverse_jvp(m: tuple[jax.Array], dm: tuple[jax.Array]) -> Any:
  found = inverse(*m)
  return found, -dot(found, dot(*dm, found))


def polished(q: jax.Array) -> jax.Array:
  """q, orthogonal but for rounding, one Newton step nearer to orthogonal.

  The step is q (3 I - q.T q) / 2, towards the nearest orthogonal matrix. It
  corrects rounding only, so the gradient passes it by.
  """
  fixed = jax.lax.stop_gradient(q)
  # q + q (I - q.T q) / 2 keeps the digits of q; q (3 I - q.T q) / 2 does not.
  defect = eye_like(fixed) - dot(transpose(fixed), fixed)
  return q + dot(fixed, defect) / 2
