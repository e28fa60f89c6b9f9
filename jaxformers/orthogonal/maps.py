"""Maps from unconstrained arrays to rotations: pure functions on [..., d, d].

Each map has the signature `map(a, base=None)`, reads the strict lower triangle
of a and gives the identity at a = 0. A base (a "trivialisation", Lezcano-Casado
2019, https://arxiv.org/abs/1909.09501) multiplies the result from the left, so
that a = 0 gives the base. All maps are products at full precision, whatever the
compute type of the model, and their gradients reuse the inverse or the products
of the forward pass. docs/orthogonal.md compares range, cost and accuracy.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.orthogonal.products import (
  dot,
  eye_like,
  inverse,
  reorthogonalize,
  transpose,
)
from jaxformers.registry import Registry

MAPS: Registry = Registry("orthogonal map")


def skew(a: jax.Array) -> jax.Array:
  """Returns the skew-symmetric matrix of the strict lower triangle of a."""
  lower = jnp.tril(a, -1)
  return lower - transpose(lower)


def orthogonality_defect(q: jax.Array) -> jax.Array:
  """Returns max |q.T q - I| of each matrix of q [..., d, d] -> [...]."""
  return jnp.abs(dot(transpose(q), q) - eye_like(q)).max((-1, -2))


def _times_base(base: jax.Array | None, q: jax.Array) -> jax.Array:
  return q if base is None else dot(base, q)


@MAPS.register("cayley")
def cayley(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the rotation (I - s/2)^-1 (I + s/2) with s = skew(a).

  Cannot reach a matrix with eigenvalue -1. Agrees with `expm` to second order
  in s.

  Source: Helfrich et al. 2018, https://arxiv.org/abs/1707.09520, with A = -s/2
  and D = I.

  Args:
    a: [..., d, d], unconstrained; only the strict lower triangle is read.
    base: [..., d, d], orthogonal, or None for the identity.

  Returns:
    [..., d, d] with orthonormal columns; determinant 1 and I where a == 0,
    without a base. In float32 `orthogonality_defect` stays below 5e-6 up to
    d = 512.
  """
  # (I - s)^-1 (I + s) = 2 (I - s)^-1 - I.
  s = skew(a) / 2
  q = 2 * inverse(eye_like(s) - s) - eye_like(s)
  # Elimination loses digits for eigenvalues near -1; elsewhere a correction is
  # not worth its cost.
  far = jnp.any(~(jnp.square(s).sum(-1) <= 4))
  return _times_base(base, jax.lax.cond(far, reorthogonalize, lambda q: q, q))


@MAPS.register("expm")
def expm(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the rotation exp(s) with s = skew(a), by Taylor and squarings.

  Reaches every matrix of determinant 1. The norm of the largest matrix decides
  the number of squarings at run time.

  Source: Lezcano-Casado and Martinez-Rubio 2019,
  https://arxiv.org/abs/1901.08428.

  Args:
    a: [..., d, d], unconstrained; only the strict lower triangle is read.
    base: [..., d, d], orthogonal, or None for the identity.

  Returns:
    [..., d, d] with orthonormal columns; determinant 1 and I where a == 0,
    without a base. In float32 `orthogonality_defect` stays below 5e-6 up to
    d = 512 and norms of s up to 1e4. The error of the angles is the precision
    of the type times the norm of s; where that leaves no digit, the result is
    NaN. There is no forward-mode differentiation.
  """
  return _times_base(base, _exponential(skew(a)))


@MAPS.register("householder")
def householder(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns the rotation -H_1 ... H_d with H_i = I - 2 v_i v_i.T / |v_i|^2.

  v_i is column i of the unit lower triangular matrix of a. The sign gives the
  identity at a = 0. Reaches all rotations but a set of measure zero, for which
  a v_i would have to be infinite.

  The product is I - V T V.T. V has the columns v_i at length sqrt 2, and T is
  the inverse of the upper triangle of V.T V with ones on its diagonal (Joffrain
  et al. 2006, https://doi.org/10.1145/1141885.1141886).

  Source: Mhammedi et al. 2017, https://arxiv.org/abs/1612.00188.

  Args:
    a: [..., d, d], unconstrained; only the strict lower triangle is read.
    base: [..., d, d], orthogonal, or None for the identity.

  Returns:
    [..., d, d] with orthonormal columns; determinant 1 and I where a == 0,
    without a base. In float32 `orthogonality_defect` stays below 5e-6 up to
    d = 512.
  """
  v = jnp.tril(a, -1) + eye_like(a)
  v = v * (math.sqrt(2) / jnp.sqrt(jnp.square(v).sum(-2, keepdims=True)))
  t = inverse(jnp.triu(dot(transpose(v), v), 1) + eye_like(a))
  return _times_base(
    base, reorthogonalize(dot(dot(v, t), transpose(v)) - eye_like(a))
  )


@MAPS.register("matrix")
def matrix(a: jax.Array, base: jax.Array | None = None) -> jax.Array:
  """Returns a, which is orthogonal but for rounding, with rounding corrected.

  For matrices that an optimiser keeps orthogonal: `training.riemannian`.

  Args:
    a: [..., d, d], orthogonal to about 1e-3.
    base: [..., d, d], orthogonal, or None for the identity.
  """
  return _times_base(base, reorthogonalize(a))


# sum_j x^j / j! up to j = 12 is (B2 + A) A + B1 with A = B3 + B4^2 and cubic
# polynomials B1 to B4. This takes four products with those for x^2 and x^3, and
# blocks of powers take five. The form is that of Bader, Blanes and Casas 2019,
# https://doi.org/10.3390/math7121174; of the values with A(0) = 0 these are the
# best conditioned.
TAYLOR = (
  (1.0, 0.4132975346132395, -0.25133290860040347, -0.038195415527404554),  # B1
  (5.89, 1.1101040205465922, 0.01936796491052117, 0.012703490213112725),  # B2
  (0.0, 0.09960992621167408, 0.08972840645506701, 0.005299482825022883),  # B3
  (0.0, 0.1318106101383018, 0.02027855540589259, 0.006759518468630864),  # B4
)


def _powers(s: jax.Array) -> tuple[jax.Array, ...]:
  s2 = dot(s, s)
  return s, s2, dot(s, s2)


def _taylor(powers: tuple[jax.Array, ...]) -> jax.Array:
  s, s2, s3 = powers
  b1, b2, b3, b4 = (
    c[0] * eye_like(s) + c[1] * s + c[2] * s2 + c[3] * s3 for c in TAYLOR
  )
  a = b3 + dot(b4, b4)
  return b1 + dot(b2 + a, a)


def _squarings(powers: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns the number of squarings, and the matrices that have no result.

  The polynomial is exact for all matrices after as many halvings. True marks
  matrices [..., 1, 1] that are not finite, or so large that no digit of their
  angles is right; they do not count.
  """
  s, s2, s3 = powers
  # s is normal, so its norm is the k-th root of the norm of s^k, which any norm
  # bounds. The Frobenius norm counts every eigenvalue twice.
  frobenius = jnp.sqrt(jnp.square(s3).sum((-1, -2)) / 2)
  bound = jnp.minimum(
    jnp.cbrt(jnp.minimum(frobenius, jnp.abs(s3).sum(-1).max(-1))),
    jnp.sqrt(jnp.abs(s2).sum(-1).max(-1)),
  )
  # Halve until the first term left out is below the rounding of 1.
  eps = float(jnp.finfo(s.dtype).eps)
  lost = ~(bound * eps < 0.1)
  bound = jnp.where(lost, 0, bound).max(initial=0)
  ratio = bound / (eps / 2 * math.factorial(13)) ** (1 / 13)
  count = jnp.ceil(jnp.log2(jnp.maximum(ratio, 1))).astype(jnp.int32)
  return count, lost[..., None, None]


@jax.custom_vjp
def _exponential(s: jax.Array) -> jax.Array:
  return _exponential_forward(s)[0]


def _exponential_forward(s: jax.Array) -> tuple[jax.Array, Any]:
  powers, pull_powers = jax.vjp(_powers, s)
  count, lost = _squarings(powers)
  # Apply the polynomial to s / 2^count, then square count times.
  scale = jnp.exp2(-count.astype(s.dtype))
  scaled = tuple(p * scale**j for j, p in enumerate(powers, 1))
  x, pull_taylor = jax.vjp(_taylor, scaled)
  q = jax.lax.fori_loop(0, count, lambda _, x: dot(x, x), x)
  # Every squaring doubles the rounding error. Up to three need no correction.
  q = jax.lax.cond(count > 3, reorthogonalize, lambda q: q, q)
  q = jnp.where(lost, jnp.nan, q)
  return q, (x, count, scale, pull_taylor, pull_powers)


def _exponential_backward(residuals: Any, g: jax.Array) -> tuple[jax.Array]:
  x, count, scale, pull_taylor, pull_powers = residuals

  def adjoint(x: jax.Array, g: jax.Array) -> jax.Array:
    return dot(transpose(x), g) + dot(g, transpose(x))

  def halve(_: Any, both: tuple[Any, Any]) -> tuple[Any, Any]:
    x, g = dot(both[0], both[0]), both[1]
    return x, adjoint(x, g)

  # The adjoints of the squarings commute, because all x do. So they run in the
  # order of the forward pass, which computes x again and keeps nothing.
  g = jax.lax.cond(count > 0, adjoint, lambda x, g: g, x, g)
  _, g = jax.lax.fori_loop(1, count, halve, (x, g))
  (scaled,) = pull_taylor(g)
  return pull_powers(tuple(p * scale**j for j, p in enumerate(scaled, 1)))


_exponential.defvjp(_exponential_forward, _exponential_backward)


def initializer(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  """Draws normal values whose rotations have a wide range of angles at every d.

  With the standard deviation 1.5 / sqrt(d) the eigenvalues of s spread over
  +-3i: angles up to 113 degrees under `cayley`, 172 under `expm`. With unit
  normals nearly all eigenvalues of a Cayley map at d = 512 would be near -1.
  """
  return 1.5 / math.sqrt(shape[-1]) * jax.random.normal(key, shape, dtype)
