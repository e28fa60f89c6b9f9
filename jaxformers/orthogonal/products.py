"""What the maps are made of: matrix products at full precision, no LAPACK.

LAPACK's factorisations are slow on accelerators, and inside some programs can
hang for good on CPUs with few cores. All of this works on [..., d, d].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
  """a @ b at the full precision of its type, on accelerators too."""
  return jnp.matmul(a, b, precision=_HIGHEST)


def transpose(a: jax.Array) -> jax.Array:
  """The last two axes exchanged."""
  return jnp.swapaxes(a, -1, -2)


def eye_like(a: jax.Array) -> jax.Array:
  """The identity in the shape and type of a."""
  return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def _sweep(m: jax.Array, block: int) -> jax.Array:
  """The inverse of m [k, d, d] by Gauss-Jordan elimination, block by block.

  There is no pivoting, so the symmetric part of m must be positive definite;
  then every pivot's is too.
  """
  k, d, _ = m.shape

  def eliminate(i: jax.Array, m: jax.Array) -> jax.Array:
    at = i * block
    rows = jax.lax.dynamic_slice_in_dim(m, at, block, 1)
    columns = jax.lax.dynamic_slice_in_dim(m, at, block, 2)
    pivot = jax.lax.dynamic_slice_in_dim(rows, at, block, 2)
    inverse = 1 / pivot if block == 1 else _sweep(pivot, 1)
    rows = dot(inverse, rows)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, inverse, at, 2)
    unit = jnp.broadcast_to(-jnp.eye(block, dtype=m.dtype), (k, block, block))
    columns = jax.lax.dynamic_update_slice_in_dim(columns, unit, at, 1)
    m = jax.lax.dynamic_update_slice_in_dim(
      m, jnp.zeros((k, d, block), m.dtype), at, 2
    )
    m = jax.lax.dynamic_update_slice_in_dim(
      m, jnp.zeros((k, block, d), m.dtype), at, 1
    )
    return m - dot(columns, rows)

  return jax.lax.fori_loop(0, d // block, eliminate, m)


@jax.custom_vjp
def inverse(m: jax.Array) -> jax.Array:
  """The inverse of m [..., d, d]; its gradient reuses it.

  Only for matrices whose symmetric part is positive definite, such as I - s
  with s skew-symmetric.
  """
  d = m.shape[-1]
  block = min(32, d)
  flat = m.reshape((-1, d, d))
  padding = -d % block  # The added rows and columns are the identity's.
  padded = jnp.pad(flat, ((0, 0), (0, padding), (0, padding)))
  if padding:
    ones = jnp.pad(jnp.zeros(d, m.dtype), (0, padding), constant_values=1)
    padded = padded + jnp.diag(ones)[None]
  return _sweep(padded, block)[:, :d, :d].reshape(m.shape)


def _inverse_forward(m: jax.Array) -> tuple[jax.Array, jax.Array]:
  found = inverse(m)
  return found, found


def _inverse_backward(found: jax.Array, g: jax.Array) -> tuple[jax.Array]:
  # d(m^-1) = -m^-1 dm m^-1.
  return (-dot(transpose(found), dot(g, transpose(found))),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def polished(q: jax.Array) -> jax.Array:
  """q, orthogonal but for rounding, one Newton step nearer to orthogonal.

  The step is q (3 I - q.T q) / 2, towards the nearest orthogonal matrix. It
  corrects rounding only, so the gradient passes it by.
  """
  fixed = jax.lax.stop_gradient(q)
  # q + q (I - q.T q) / 2 keeps the digits of q; q (3 I - q.T q) / 2 does not.
  defect = eye_like(fixed) - dot(transpose(fixed), fixed)
  return q + dot(fixed, defect) / 2
