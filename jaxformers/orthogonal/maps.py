"""Maps from unconstrained arrays to rotations, for one array or a whole model.

A map is a pure function on [..., d, d] with the signature `map(a, base=None)`.
It reads the strict lower triangle of a, and returns the identity at a = 0. A
base (a "trivialisation", Lezcano-Casado 2019, https://arxiv.org/abs/1909.09501)
multiplies the result from the left, so that a = 0 gives the base. All maps
compute products at full precision, for any compute type of the model. Their
gradients reuse the inverse or the products of the forward pass.
docs/orthogonal.md compares range, cost and accuracy.

A module stores an array under a name that ends in `_skew`, or in `_orthogonal`
for the map "matrix" (see `parameter_name`). `rotations` maps the arrays of a
whole model, by one batched call per size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations.registry import Registry
from jaxformers.orthogonal.exponential import exponential
from jaxformers.orthogonal.products import (
  dot,
  eye_like,
  frobenius,
  inverse,
  limit_norm,
  polar,
  reorthogonalize,
  transpose,
)

MAPS: Registry = Registry("orthogonal map")
SKEW = "_skew"
ORTHOGONAL = "_orthogonal"


def skew(a: jax.Array) -> jax.Array:
  """Returns L - L.T, where L is the strict lower triangle of a.

  Example:
    >>> skew(jnp.array([[5.0, 7.0], [2.0, 5.0]])).tolist()
    [[0.0, -2.0], [2.0, 0.0]]
  """
  lower = jnp.tril(a, -1)
  return lower - transpose(lower)


def orthogonality_defect(q: jax.Array) -> jax.Array:
  """Returns max |q.T q - I| of each matrix of q [..., d, d] -> [...].

  Example:
    >>> orthogonality_defect(2 * jnp.eye(3)).item()
    3.0
  """
  return jnp.abs(dot(transpose(q), q) - eye_like(q)).max((-1, -2))


def _times_base(base: jax.Array | None, q: jax.Array) -> jax.Array:
  return q if base is None else dot(base, q)


@MAPS.register("cayley")
def cayley(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the rotation (I - s/2)^-1 (I + s/2) with s = skew(a).

  The map cannot reach a matrix with the eigenvalue -1. It agrees with `expm` to
  second order in s.

  Source: Helfrich et al. 2018, https://arxiv.org/abs/1707.09520, with A = -s/2
  and D = I.

  Args:
    a: unconstrained array [..., d, d]; only the strict lower triangle is read.
    base: orthogonal matrices [..., d, d], or None for the identity.

  Returns:
    Orthogonal matrices [..., d, d]. Without a base they have determinant 1, and
    are I where a == 0. In float32 `orthogonality_defect` stays below 5e-6 up to
    d = 512, for all finite a. The error of the angles is the precision of the
    dtype times the norm of s. `limit_norm` scales larger s down, before all
    digits of the angles are lost.

  Example:
    >>> a = jnp.array([[0.0, 0.0], [2.0, 0.0]])  # s = [[0, -2], [2, 0]]
    >>> cayley(a).round(6).tolist()
    [[0.0, -1.0], [1.0, 0.0]]
  """
  return _times_base(base, _cayley(skew(a) / 2, inverse))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cayley(s: jax.Array, invert: Map) -> jax.Array:
  """Returns (I - s)^-1 (I + s) = 2 (I - s)^-1 - I, with s limited.

  `limit_norm` scales s down if it is too large.

  Args:
    s: skew-symmetric matrices, [..., d, d].
    invert: function that returns the inverse of I - s.
  """
  q = 2 * invert(eye_like(s) - s) - eye_like(s)
  # Elimination loses digits if s is large. Correct the result only then.
  far = jnp.any(~(jnp.square(s).sum(-1) <= 4))
  return jax.lax.cond(far, _correct, lambda q, s: q, q, s)


@_cayley.defjvp
def _cayley_jvp(invert: Map, s: tuple[jax.Array], ds: tuple[jax.Array]) -> Any:
  q = _cayley(*s, invert)
  # dq = 2 (I - s)^-1 ds (I - s)^-1, where (I - s)^-1 = (q + I) / 2.
  inverted = (q + eye_like(q)) / 2
  _, slope = jax.jvp(limit_norm, s, ds)
  return q, 2 * dot(inverted, dot(slope, inverted))


def _correct(q: jax.Array, s: jax.Array) -> jax.Array:
  """Returns the Cayley map q of s with its rounding errors corrected.

  The errors of elimination without pivoting grow with the square of the norm of
  s. One Newton step corrects small errors. Matrices with large errors are
  recomputed as the square of the polar factor of I + s.
  """
  # Take one Newton step.
  defect = eye_like(q) - dot(transpose(q), q)
  corrected = q + dot(q, defect) / 2
  # Find matrices whose error is too large for one step, which squares it, and
  # those whose s was scaled down.
  limited = limit_norm(s)
  lost = ~(frobenius(defect) <= 4 * math.sqrt(jnp.finfo(q.dtype).eps))
  lost = lost | (limited != s).any((-1, -2), keepdims=True)
  lost = lost & jnp.isfinite(s).all((-1, -2), keepdims=True)

  def again(_: jax.Array) -> jax.Array:
    x = jnp.where(lost, eye_like(s) + limited, eye_like(s))
    # The singular values of I + s are at least 1, and at most this norm.
    norm = jnp.abs(x).sum(-1, keepdims=True).max(-2, keepdims=True)
    root = polar(x / norm, 1 / norm.max(initial=1))
    return jnp.where(lost, dot(root, root), corrected)

  return jax.lax.cond(lost.any(), again, lambda q: q, corrected)


@MAPS.register("bro")
def bro(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the product of two reflections of blocks, by an inverse of half d.

  With r = d // 2 and V = [I; B], where B is the lower left block [d - r, r] of
  a, this is I - 2 V (V.T V)^-1 V.T times the same at B = 0. It equals the
  Cayley map of twice the array in which only this block is not 0, and needs an
  inverse of size r instead of d. It reaches a part of all rotations only, of
  half their dimension.

  Source: BRONet, 2025, https://arxiv.org/abs/2505.15174 (block reflector
  orthogonal layers). Differs from it: the reflection at B = 0 is divided out,
  so that a = 0 gives the identity, and nothing is added to V.T V.

  Args:
    a: unconstrained array [..., d, d]; only the block [r:, :r] is read.
    base: orthogonal matrices [..., d, d], or None for the identity.

  Returns:
    Orthogonal matrices [..., d, d], with the precision of `cayley`.

  Example:
    >>> q = bro(jax.random.normal(jax.random.key(0), (3, 8, 8)))
    >>> bool((orthogonality_defect(q) < 5e-6).all())
    True
  """
  d = a.shape[-1]
  place = jnp.arange(d)
  is_block = (place[:, None] >= d // 2) & (place[None] < d // 2)
  # Cayley's factor 1/2 belongs to skew(a); B is not halved.
  s = skew(jnp.where(is_block, a, 0))
  return _times_base(base, _cayley(s, _invert_blocks))


def _invert_blocks(m: jax.Array) -> jax.Array:
  """Returns the inverse of [[I, B.T], [-B, I]], whose first block is d // 2."""
  r = m.shape[-1] // 2
  if not r:
    return m  # The identity.
  b = -m[..., r:, :r]
  g = inverse(eye_like(m[..., :r, :r]) + dot(transpose(b), b))
  corner = dot(b, g)
  rest = eye_like(m[..., r:, r:]) - dot(corner, transpose(b))
  top = jnp.concatenate([g, -transpose(corner)], -1)
  return jnp.concatenate([top, jnp.concatenate([corner, rest], -1)], -2)


@MAPS.register("expm")
def expm(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the rotation exp(s) with s = skew(a), by Taylor and squarings.

  The map reaches every orthogonal matrix of determinant 1. The norm of the
  largest matrix decides the number of squarings at run time.

  Source: Lezcano-Casado and Martinez-Rubio 2019,
  https://arxiv.org/abs/1901.08428.

  Args:
    a: unconstrained array [..., d, d]; only the strict lower triangle is read.
    base: orthogonal matrices [..., d, d], or None for the identity.

  Returns:
    Orthogonal matrices [..., d, d]. Without a base they have determinant 1, and
    are I where a == 0. In float32 `orthogonality_defect` stays below 5e-6 up to
    d = 512, for all finite a. The error of the angles is the precision of the
    dtype times the norm of s. `limit_norm` scales larger s down, before all
    digits of the angles are lost. There is no forward-mode differentiation.

  Example:
    >>> a = jnp.array([[0.0, 0.0], [jnp.pi / 2, 0.0]])  # A quarter turn.
    >>> abs(expm(a) - jnp.array([[0.0, -1.0], [1.0, 0.0]])).max() < 1e-6
    Array(True, dtype=bool)
  """
  return _times_base(base, exponential(limit_norm(skew(a))))


@MAPS.register("householder")
def householder(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the rotation -H_1 ... H_d with H_i = I - 2 v_i v_i.T / |v_i|^2.

  v_i is column i of the unit lower triangular matrix of a. The sign gives the
  identity at a = 0. The map reaches all rotations except for a set of measure
  zero, for which a v_i would have to be infinite.

  The product is I - V T V.T. V has the columns v_i, scaled to length sqrt(2),
  and T is the inverse of the upper triangle of V.T V with ones on its diagonal
  (Joffrain et al. 2006, https://doi.org/10.1145/1141885.1141886).

  Source: Mhammedi et al. 2017, https://arxiv.org/abs/1612.00188.

  Args:
    a: unconstrained array [..., d, d]; only the strict lower triangle is read.
    base: orthogonal matrices [..., d, d], or None for the identity.

  Returns:
    Orthogonal matrices [..., d, d]. Without a base they have determinant 1, and
    are I where a == 0. In float32 `orthogonality_defect` stays below 5e-6 up to
    d = 512, for all finite a.

  Example:
    >>> q = householder(jax.random.normal(jax.random.key(0), (3, 8, 8)))
    >>> bool((orthogonality_defect(q) < 5e-6).all())
    True
  """
  v = jnp.tril(a, -1) + eye_like(a)
  # Scale the columns to length sqrt(2). First divide by the greatest entry, so
  # that squares do not overflow; divide twice by its root, since the inverse of
  # the entry can underflow.
  largest = jax.lax.stop_gradient(jnp.abs(v).max(-2, keepdims=True))
  v = v * jax.lax.rsqrt(largest) * jax.lax.rsqrt(largest)
  v = v * (math.sqrt(2) / jnp.sqrt(jnp.square(v).sum(-2, keepdims=True)))
  # V T V.T - I, with rounding corrected.
  t = inverse(jnp.triu(dot(transpose(v), v), 1) + eye_like(a))
  return _times_base(
    base, reorthogonalize(dot(dot(v, t), transpose(v)) - eye_like(a))
  )


@MAPS.register("matrix")
def matrix(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns a, with its deviation from orthogonality corrected.

  Used for matrices that an optimiser keeps orthogonal up to rounding: see
  `training.riemannian`.

  Args:
    a: matrices [..., d, d], orthogonal to about 1e-3.
    base: orthogonal matrices [..., d, d], or None for the identity.
  """
  return _times_base(base, reorthogonalize(a))


def initializer(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  """Draws normal values whose rotations have a wide range of angles at every d.

  With the standard deviation 1.5 / sqrt(d) the eigenvalues of s are spread from
  -3i to 3i. This gives angles of up to 113 degrees under `cayley`, and of up to
  172 degrees under `expm`. With a standard deviation of 1 nearly all
  eigenvalues of the Cayley map at d = 512 would be near -1.
  """
  return 1.5 / math.sqrt(shape[-1]) * jax.random.normal(key, shape, dtype)


def parameter_name(name: str, orthogonal_map: str) -> str:
  """Returns the name of the parameter that holds orthogonal matrices.

  For the map "matrix" the name is `name`_orthogonal: the parameter holds the
  matrices, which the optimiser must keep orthogonal (`training.riemannian`).
  For other maps it is `name`_skew: the parameter is unconstrained, and any
  optimiser may change it.

  Args:
    name: name of the matrices.
    orthogonal_map: name of the map, in `MAPS`.
  """
  return name + (ORTHOGONAL if orthogonal_map == "matrix" else SKEW)


def _last(path: tuple[Any, ...]) -> str:
  return str(getattr(path[-1], "key", path[-1]))


def is_skew(path: tuple[Any, ...]) -> bool:
  """True if a path of `jax.tree_util` names unconstrained parameters."""
  return _last(path).endswith(SKEW)


def is_orthogonal(path: tuple[Any, ...]) -> bool:
  """True if a path of `jax.tree_util` names matrices kept orthogonal."""
  return _last(path).endswith(ORTHOGONAL)


def is_parameter(path: tuple[Any, ...]) -> bool:
  """True if a path of `jax.tree_util` names parameters of rotations."""
  return is_skew(path) or is_orthogonal(path)


def _at_least_float32(a: jax.Array) -> jax.Array:
  return a.astype(jnp.promote_types(a.dtype, jnp.float32))


Map = Callable[[jax.Array], jax.Array]


def rotations(
  params: Mapping[str, Any],
  orthogonal_map: str,
  bases: Mapping[str, Any] | None = None,
  *,
  spread: Callable[[Map], Map] = lambda function: function,
) -> dict[str, Any]:
  """Returns the orthogonal matrices of a model, by one batched call per size.

  Args:
    params: tree of parameters; leaves named `*_skew` or `*_orthogonal` have the
      shape [..., d, d].
    orthogonal_map: name of the map, in `MAPS`.
    bases: bases of the rotations, a tree like the result, or None for
      identities; each base is multiplied by the mapped parameter.
    spread: function that wraps the map [k, d, d] -> [k, d, d], to distribute
      the k matrices over the devices.

  Returns:
    Linen collection `rotations`: a tree of only the leaves `*_skew` and
    `*_orthogonal`, each mapped to rotations in float32 or wider; {} if there
    are none.
  """
  # Find the parameters of orthogonal matrices.
  function = spread(MAPS[orthogonal_map])
  flattened = jax.tree_util.tree_flatten_with_path(params)[0]
  leaves = [(path, leaf) for path, leaf in flattened if is_parameter(path)]
  # Map all matrices of one size in one call.
  mapped: dict[tuple[Any, ...], jax.Array] = {}
  for d in sorted({leaf.shape[-1] for _, leaf in leaves}):
    group = [(path, leaf) for path, leaf in leaves if leaf.shape[-1] == d]
    flat = [_at_least_float32(leaf).reshape((-1, d, d)) for _, leaf in group]
    stacked = function(jnp.concatenate(flat))
    start = 0
    for (path, leaf), part in zip(group, flat, strict=True):
      stop = start + len(part)
      mapped[path] = stacked[start:stop].reshape(leaf.shape)
      start = stop
  # Put the results into a tree with the paths of the parameters.
  tree: dict[str, Any] = {}
  for path, matrices in mapped.items():
    node = tree
    for entry in path[:-1]:
      node = node.setdefault(entry.key, {})
    node[path[-1].key] = matrices
  # Multiply by the bases.
  if bases is None:
    return tree
  return jax.tree.map(
    lambda base, q: dot(base, q),
    dict(bases),
    tree,
  )
