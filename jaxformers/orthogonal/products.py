"""Products and inverses at full precision on [..., d, d], without LAPACK.

LAPACK's factorisations are slow on accelerators. In some programs on CPUs with
few cores they can hang forever.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms

_HIGHEST = jax.lax.Precision.HIGHEST
# Size up to which elimination is faster than block products; on a TPU, with the
# kernel, which keeps a matrix in registers.
_SMALL, _SMALL_KERNEL = 32, 128


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns a @ b at the full precision of its dtype, also on accelerators."""
  return jnp.matmul(a, b, precision=_HIGHEST)


def transpose(a: jax.Array) -> jax.Array:
  """Returns a with its last two axes exchanged."""
  return jnp.swapaxes(a, -1, -2)


def eye_like(a: jax.Array) -> jax.Array:
  """Returns identity matrices with the shape and dtype of a."""
  return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def _eliminate(m: jax.Array) -> jax.Array:
  """Returns the inverse of small m [k, d, d] by Gauss-Jordan elimination."""

  def eliminate(i: jax.Array, m: jax.Array) -> jax.Array:
    # Divide row i by the pivot, and replace the pivot by its inverse.
    row = jax.lax.dynamic_slice_in_dim(m, i, 1, 1)
    column = jax.lax.dynamic_slice_in_dim(m, i, 1, 2)
    pivot = 1 / jax.lax.dynamic_slice_in_dim(row, i, 1, 2)
    row = jax.lax.dynamic_update_slice_in_dim(row * pivot, pivot, i, 2)
    # Clear row and column i, and subtract their outer product.
    column = jax.lax.dynamic_update_slice_in_dim(
      column, -jnp.ones_like(pivot), i, 1
    )
    m = jax.lax.dynamic_update_slice_in_dim(m, jnp.zeros_like(column), i, 2)
    m = jax.lax.dynamic_update_slice_in_dim(m, jnp.zeros_like(row), i, 1)
    return m - column * row

  return jax.lax.fori_loop(0, m.shape[-1], eliminate, m)


def _eliminate_in_kernel(m: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Returns the inverse of m float32 [k, d, d], d <= 128, by a Pallas kernel.

  It is `_eliminate` for TPUs. XLA runs five programs for each row there, whose
  latency is a third of TransJect's train step. The kernel eliminates all rows
  of a matrix in one program, and needs a ninth of the cycles.

  Args:
    m: matrices.
    interpret: True to run the kernel on any device, for tests.
  """
  from jax.experimental import pallas  # Slow to import, and for TPUs only.

  d = m.shape[-1]

  def kernel(m_ref: Any, inverse_ref: Any) -> None:
    rows = jax.lax.broadcasted_iota(jnp.int32, (d, 1), 0)
    columns = jax.lax.broadcasted_iota(jnp.int32, (1, d), 1)

    def eliminate(i: jax.Array, m: jax.Array) -> jax.Array:
      # Take row i, column i and the inverse of the pivot by masked sums.
      row = jnp.where(rows == i, m, 0).sum(0, keepdims=True)
      column = jnp.where(columns == i, m, 0).sum(1, keepdims=True)
      pivot = 1 / jnp.where(columns == i, row, 0).sum(1, keepdims=True)
      row = row * pivot
      cleared = jnp.where(columns == i, -column * pivot, m - column * row)
      return jnp.where(rows == i, jnp.where(columns == i, pivot, row), cleared)

    inverse_ref[0] = jax.lax.fori_loop(0, d, eliminate, m_ref[0])

  block = pallas.BlockSpec((1, d, d), lambda i: (i, 0, 0))
  call = pallas.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(m.shape, m.dtype),
    grid=(len(m),),
    in_specs=[block],
    out_specs=block,
    interpret=interpret,
  )
  # XLA cannot split a kernel over devices, so each device runs all of it.
  mesh = jax.sharding.get_abstract_mesh()
  if split := set(mesh.axis_names) - set(mesh.manual_axes):
    everywhere = jax.sharding.PartitionSpec()
    call = jax.shard_map(
      call,
      in_specs=everywhere,
      out_specs=everywhere,
      axis_names=split,
      check_vma=False,
    )
  return call(m)


@functools.partial(jax.jit, inline=True, static_argnames="with_kernel")
def _invert(m: jax.Array, *, with_kernel: bool = False) -> jax.Array:
  """Returns the inverse of m [k, d, d] by its blocks, recursively.

  Inverts the upper left block and its Schur complement. There is no pivoting,
  so the symmetric part of m must be positive definite. The symmetric parts of
  both blocks are then positive definite, too. With `jit` each size is traced
  once, and not once per block.
  """
  d = m.shape[-1]
  small = _SMALL_KERNEL if with_kernel else _SMALL
  if d <= small:
    return (_eliminate_in_kernel if with_kernel else _eliminate)(m)
  h = -(-d // (2 * small)) * small  # At least d / 2, a multiple of `small`.
  a, b, c, e = m[:, :h, :h], m[:, :h, h:], m[:, h:, :h], m[:, h:, h:]
  # Invert a, then its Schur complement e - c a^-1 b.
  a = _invert(a, with_kernel=with_kernel)
  right, below = dot(a, b), dot(c, a)
  e = _invert(e - dot(c, right), with_kernel=with_kernel)
  # Put the four blocks of the inverse together.
  corner = dot(e, below)
  top = jnp.concatenate([a + dot(right, corner), -dot(right, e)], 2)
  return jnp.concatenate([top, jnp.concatenate([-corner, e], 2)], 1)


@jax.custom_jvp
def inverse(m: jax.Array) -> jax.Array:
  """Returns the inverse of m [..., d, d]; its gradient reuses the inverse.

  The symmetric part of m must be positive definite. This is the case for
  m = I - s with skew-symmetric s.
  """
  stack = m.reshape((-1, *m.shape[-2:]))
  with_kernel = platforms.has_kernels() and m.dtype == jnp.float32
  return _invert(stack, with_kernel=with_kernel).reshape(m.shape)


@inverse.defjvp
def _inverse_jvp(m: tuple[jax.Array], dm: tuple[jax.Array]) -> Any:
  # d(m^-1) = -m^-1 dm m^-1
  inverted = inverse(*m)
  return inverted, -dot(inverted, dot(*dm, inverted))


def reorthogonalize(q: jax.Array) -> jax.Array:
  """Corrects the rounding of an orthogonal q [..., d, d] by one Newton step.

  The step q (3 I - q.T q) / 2 goes towards the nearest orthogonal matrix. The
  gradient ignores the step, because the step corrects only rounding.
  """
  fixed = jax.lax.stop_gradient(q)
  # Compute q + q (I - q.T q) / 2, which loses fewer digits of q than
  # q (3 I - q.T q) / 2.
  defect = eye_like(fixed) - dot(transpose(fixed), fixed)
  return q + dot(fixed, defect) / 2


def polar(x: jax.Array, smallest: jax.Array) -> jax.Array:
  """Returns the nearest orthogonal matrices to x [..., d, d], by Newton steps.

  A step needs two products, and changes each singular value s to
  s (3 - s^2) / 2. Small singular values grow by half per step, and singular
  values near 1 converge to 1.

  Args:
    x: matrices [..., d, d] with singular values of at most 1.
    smallest: lower bound of the singular values of all x, which decides the
      number of steps at run time.
  """
  steps = jnp.ceil(-jnp.log(smallest) / math.log(1.5)) + 6

  def step(_: jax.Array, x: jax.Array) -> jax.Array:
    return x + dot(x, eye_like(x) - dot(transpose(x), x)) / 2

  return jax.lax.fori_loop(0, steps.astype(jnp.int32), step, x)


def frobenius(x: jax.Array) -> jax.Array:
  """Returns the Frobenius norms [..., 1, 1] of the matrices x [..., d, d]."""
  return jnp.sqrt(jnp.square(x).sum((-1, -2), keepdims=True))


def limit_norm(s: jax.Array) -> jax.Array:
  """Scales skew-symmetric s [..., d, d] down if its norm exceeds a limit.

  Below the limit the maps return some right digits of the angles. The limit is
  1 / (32 eps) of the dtype, which is 262,144 in float32. The norm is the
  greatest absolute row sum, which bounds the spectral norm.
  """
  limit = float(1 / (32 * jnp.finfo(s.dtype).eps))
  # Scale by an exact power of two, so that the row sums do not overflow.
  small = s * 2**-16
  norm = jnp.abs(small).sum(-1, keepdims=True).max(-2, keepdims=True)
  return small * (limit / jnp.maximum(norm, limit * 2**-16))
