"""The exponential of skew-symmetric matrices, by a polynomial and squarings."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.orthogonal.products import (
  dot,
  eye_like,
  reorthogonalize,
  transpose,
)

# The Taylor polynomial sum_j x^j / j! up to j = 12 equals (B2 + A) A + B1 with
# A = B3 + B4^2 and cubic polynomials B1 to B4. This form needs four products,
# including x^2 and x^3; a form with blocks of powers needs five. It is from
# Bader, Blanes and Casas 2019, https://doi.org/10.3390/math7121174. Among the
# coefficients with A(0) = 0 these are the best conditioned.
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
  # (B2 + A) A + B1 with A = B3 + B4^2
  s, s2, s3 = powers
  b1, b2, b3, b4 = (
    c[0] * eye_like(s) + c[1] * s + c[2] * s2 + c[3] * s3 for c in TAYLOR
  )
  a = b3 + dot(b4, b4)
  return b1 + dot(b2 + a, a)


def _squarings(powers: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns the number of squarings, and a mask of matrices without a result.

  After so many halvings the polynomial is exact to rounding for all matrices.
  The mask [..., 1, 1] is True for matrices that are not finite, or so large
  that no digit of their angles is right. These do not affect the number.
  """
  s, s2, s3 = powers
  # s is normal, so |s|^k = |s^k| in the spectral norm, which other norms bound.
  # Eigenvalues come in conjugate pairs, so halve the squared Frobenius norm.
  frobenius = jnp.sqrt(jnp.square(s3).sum((-1, -2)) / 2)
  bound = jnp.minimum(
    jnp.cbrt(jnp.minimum(frobenius, jnp.abs(s3).sum(-1).max(-1))),
    jnp.sqrt(jnp.abs(s2).sum(-1).max(-1)),
  )
  # Halve until the first omitted term x^13 / 13! is below the rounding of 1.
  eps = float(jnp.finfo(s.dtype).eps)
  lost = ~(bound * eps < 0.1)
  bound = jnp.where(lost, 0, bound).max(initial=0)
  ratio = bound / (eps / 2 * math.factorial(13)) ** (1 / 13)
  count = jnp.ceil(jnp.log2(jnp.maximum(ratio, 1))).astype(jnp.int32)
  return count, lost[..., None, None]


@jax.custom_vjp
def exponential(s: jax.Array) -> jax.Array:
  """Returns exp(s) of skew-symmetric s [..., d, d]; see `maps.expm`."""
  return _forward(s)[0]


def _forward(s: jax.Array) -> tuple[jax.Array, Any]:
  powers, pull_powers = jax.vjp(_powers, s)
  count, lost = _squarings(powers)
  # Apply the polynomial to s / 2^count, then square count times.
  scale = jnp.exp2(-count.astype(s.dtype))
  scaled = tuple(p * scale**j for j, p in enumerate(powers, 1))
  x, pull_taylor = jax.vjp(_taylor, scaled)
  q = jax.lax.fori_loop(0, count, lambda _, x: dot(x, x), x)
  # Every squaring doubles the rounding error. Correct it by Newton steps, which
  # square the error: none up to 3 squarings, one up to 10, and three above.
  steps = (count > 3).astype(jnp.int32) + 2 * (count > 10).astype(jnp.int32)
  q = jax.lax.fori_loop(0, steps, lambda _, q: reorthogonalize(q), q)
  q = jnp.where(lost, jnp.nan, q)
  return q, (x, count, scale, pull_taylor, pull_powers)


def _backward(residuals: Any, g: jax.Array) -> tuple[jax.Array]:
  x, count, scale, pull_taylor, pull_powers = residuals

  # The adjoint of the derivative of x -> x x.
  def adjoint(x: jax.Array, g: jax.Array) -> jax.Array:
    return dot(transpose(x), g) + dot(g, transpose(x))

  def halve(_: Any, both: tuple[Any, Any]) -> tuple[Any, Any]:
    x, g = dot(both[0], both[0]), both[1]
    return x, adjoint(x, g)

  # The adjoints of the squarings commute, because all x commute. Apply them in
  # the order of the forward pass, so that x is recomputed and not stored.
  g = jax.lax.cond(count > 0, adjoint, lambda x, g: g, x, g)
  _, g = jax.lax.fori_loop(1, count, halve, (x, g))
  # Pull the gradient back through the polynomial and the powers.
  (scaled,) = pull_taylor(g)
  return pull_powers(tuple(p * scale**j for j, p in enumerate(scaled, 1)))


exponential.defvjp(_forward, _backward)
