"""Orthogonal matrices from unconstrained arrays: pure functions on [..., d, d].

A module stores an unconstrained array under a name that ends in `_skew`, so
that any optimiser works on it. `rotations` maps all of a model's at once, one
batched call for each size of matrix; the modules then read the results from
the `rotations` collection. Arithmetic is float32 at full precision, whatever
the compute type of the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.registry import Registry

SUFFIX = "_skew"
MAPS: Registry = Registry("orthogonal map")

_HIGHEST = jax.lax.Precision.HIGHEST


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, precision=_HIGHEST)


def _transpose(a: jax.Array) -> jax.Array:
  return jnp.swapaxes(a, -1, -2)


def _eye_like(a: jax.Array) -> jax.Array:
  return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def skew(a: jax.Array) -> jax.Array:
  """The skew-symmetric matrix of the strict lower triangle of a [..., d, d]."""
  lower = jnp.tril(a, -1)
  return lower - _transpose(lower)


def orthogonality_defect(q: jax.Array) -> jax.Array:
  """max |q.T q - I| of q [..., d, d], for each matrix -> [...]."""
  return jnp.abs(_dot(_transpose(q), q) - _eye_like(q)).max((-1, -2))


def _sweep(m: jax.Array, block: int) -> jax.Array:
  """The inverse of m [k, d, d] by Gauss-Jordan elimination, block by block.

  Products only: no LAPACK call, which is slow on accelerators and can hang on
  CPUs with few cores. There is no pivoting, so the symmetric part of m must be
  positive definite; then every pivot's is too.
  """
  k, d, _ = m.shape

  def eliminate(i: jax.Array, m: jax.Array) -> jax.Array:
    at = i * block
    rows = jax.lax.dynamic_slice_in_dim(m, at, block, 1)
    columns = jax.lax.dynamic_slice_in_dim(m, at, block, 2)
    pivot = jax.lax.dynamic_slice_in_dim(rows, at, block, 2)
    inverse = 1 / pivot if block == 1 else _sweep(pivot, 1)
    rows = _dot(inverse, rows)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, inverse, at, 2)
    unit = jnp.broadcast_to(-jnp.eye(block, dtype=m.dtype), (k, block, block))
    columns = jax.lax.dynamic_update_slice_in_dim(columns, unit, at, 1)
    m = jax.lax.dynamic_update_slice_in_dim(
      m, jnp.zeros((k, d, block), m.dtype), at, 2
    )
    m = jax.lax.dynamic_update_slice_in_dim(
      m, jnp.zeros((k, block, d), m.dtype), at, 1
    )
    return m - _dot(columns, rows)

  return jax.lax.fori_loop(0, d // block, eliminate, m)


def _inverse_of_identity_minus(s: jax.Array) -> jax.Array:
  """(I - s)^-1 of skew-symmetric s [..., d, d]."""
  d = s.shape[-1]
  block = min(32, d)
  flat = s.reshape((-1, d, d))
  padding = -d % block  # The added rows and columns are the identity's.
  padded = jnp.pad(flat, ((0, 0), (0, padding), (0, padding)))
  inverse = _sweep(_eye_like(padded) - padded, block)
  return inverse[:, :d, :d].reshape(s.shape)


@jax.custom_vjp
def _cayley(s: jax.Array) -> jax.Array:
  return _cayley_forward(s)[0]


def _cayley_forward(s: jax.Array) -> tuple[jax.Array, jax.Array]:
  m = _inverse_of_identity_minus(s)
  # (I - s)^-1 (I + s) = 2 m - I, and one Newton step towards the nearest
  # orthogonal matrix takes the rounding of the elimination away.
  return _newton(2 * m - _eye_like(m)), m


def _cayley_backward(m: jax.Array, g: jax.Array) -> tuple[jax.Array]:
  # q = 2 m - I and dm = m ds m, so the gradient needs no second inverse.
  return (2 * _dot(_transpose(m), _dot(g, _transpose(m))),)


_cayley.defvjp(_cayley_forward, _cayley_backward)


def _newton(q: jax.Array) -> jax.Array:
  """One step of q (3 I - q.T q) / 2, for q within rounding of orthogonal."""
  # q + q (I - q.T q) / 2 keeps the digits of q; q (3 I - q.T q) / 2 does not.
  return q + _dot(q, _eye_like(q) - _dot(_transpose(q), q)) / 2


@MAPS.register("cayley")
def cayley(a: jax.Array) -> jax.Array:
  """The rotation (I - s/2)^-1 (I + s/2) with s = skew(a).

  Cannot reach a matrix with eigenvalue -1. Agrees with `expm` to second order
  in s. The gradient reuses the inverse of the forward pass.

  Source: Helfrich et al. 2018, https://arxiv.org/abs/1707.09520, with A = -s/2
  and D = I.

  Args:
    a: [..., d, d], unconstrained; only the strict lower triangle is read.

  Returns:
    [..., d, d] with orthonormal columns and determinant 1; I where a == 0. In
    float32 `orthogonality_defect` stays below 5e-6 up to d = 512.
  """
  return _cayley(skew(a) / 2)


@MAPS.register("expm")
def expm(a: jax.Array) -> jax.Array:
  """The rotation exp(s) with s = skew(a), by JAX's scaling and squaring.

  Reaches every matrix of determinant 1.

  Source: Lezcano-Casado and Martinez-Rubio 2019,
  https://arxiv.org/abs/1901.08428.

  Args:
    a: [..., d, d], unconstrained; only the strict lower triangle is read.

  Returns:
    [..., d, d] with orthonormal columns and determinant 1; I where a == 0. In
    float32 `orthogonality_defect` stays below 5e-6 up to d = 512.
  """
  s = skew(a)
  q = jax.scipy.linalg.expm(s.reshape((-1, *s.shape[-2:]))).reshape(s.shape)
  return _newton(q)


def initializer(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  """Normal values whose rotations reach most angles, at every d.

  With standard deviation 1.5 / sqrt(d) the eigenvalues of s spread over
  +-3i: angles up to 113 degrees under `cayley`, 172 under `expm`. Unit normals
  would put nearly all eigenvalues of a Cayley map at d = 512 next to -1.
  """
  return 1.5 / math.sqrt(shape[-1]) * jax.random.normal(key, shape, dtype)


def is_skew(path: tuple[Any, ...]) -> bool:
  """Whether a path of `jax.tree_util` names unconstrained skew parameters."""
  return str(getattr(path[-1], "key", path[-1])).endswith(SUFFIX)


def _at_least_float32(a: jax.Array) -> jax.Array:
  return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def rotations(params: Mapping[str, Any], name: str) -> dict[str, Any]:
  """The orthogonal matrices of a model, by one batched call for each size.

  Args:
    params: a tree of parameters; its leaves named `*_skew` are [..., d, d].
    name: "cayley" or "expm".

  Returns:
    A tree of the leaves named `*_skew` alone, each mapped to rotations in
    float32 or wider: the Linen collection `rotations`; {} if there are none.
  """
  mapping: Callable[[jax.Array], jax.Array] = MAPS[name]
  found = jax.tree_util.tree_flatten_with_path(params)[0]
  leaves = [(path, leaf) for path, leaf in found if is_skew(path)]
  mapped: dict[tuple[Any, ...], jax.Array] = {}
  for d in sorted({leaf.shape[-1] for _, leaf in leaves}):
    group = [(path, leaf) for path, leaf in leaves if leaf.shape[-1] == d]
    flat = [_at_least_float32(leaf).reshape((-1, d, d)) for _, leaf in group]
    stacked = mapping(jnp.concatenate(flat))
    at = 0
    for (path, leaf), part in zip(group, flat, strict=True):
      mapped[path] = stacked[at : at + len(part)].reshape(leaf.shape)
      at += len(part)
  tree: dict[str, Any] = {}
  for path, matrices in mapped.items():
    node = tree
    for entry in path[:-1]:
      node = node.setdefault(entry.key, {})
    node[path[-1].key] = matrices
  return tree
