"""Sigma, the diagonal between U and V: from the embedded tokens, or learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.models.parallel import product

# float32 on accelerators too, where less is the default: it costs d^2 per token
# once, and d^3 per sample and expert.
HIGHEST = jax.lax.Precision.HIGHEST


def _safe_divisor(top: jax.Array) -> jax.Array:
  """Returns a divisor: 1 where all is zero, so that gradients stay finite."""
  return jnp.where(top > 0, top, 1)


def eigenvalues(
  x: jax.Array, basis: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns approximate eigenvalues of x.T x / n, and their error.

  The diagonal of basis.T (x.T x / n) basis minimises the distance to the
  matrix for a given basis, and is divided by its maximum so that the norm of
  Sigma is 1. (The paper asks for a "stochastic" x.T x, which has negative
  entries; only the norm is used.) The reconstruction error is the square of
  the off-diagonal part, of x.T x over the number n of tokens. The authors' code
  takes the mean over the d^2 entries of x.T x itself: this is d^2 / n^2 times
  as much. It fits the basis to the tokens, not the tokens to the
  basis: no gradient reaches x through it, or it would shrink the embedding.

  Args:
    x: [b, n, d] embedded tokens.
    basis: float32 [d, d], orthogonal.
    mask: [b, n], True at tokens.

  Returns:
    Sigma, float32 [b, d] in [0, 1] with maximum 1 (0 for a sample without
    tokens), and the squared Frobenius reconstruction error, float32 [b].
  """
  # Padding adds nothing to the sums over tokens.
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  # Project x.T x on the basis, and divide by the number of tokens.
  values, error = _diagonal(x, basis)
  values = values / count[:, None]
  # By place, as in `masked_max`.
  largest = jnp.take_along_axis(values, values.argmax(1, keepdims=True), 1)
  return values / _safe_divisor(largest), jnp.maximum(error, 0) / jnp.square(
    count
  )


@jax.custom_jvp
def _diagonal(x: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the diagonal of basis.T x.T x basis [b, d] and its error [b].

  The error is the square of the rest, and has no gradient with respect to x.

  Args:
    x: float32 [b, n, d].
    basis: float32 [d, d], orthogonal.
  """
  # Without gradients the error is left out as a rule; this is cheapest then.
  values = jnp.square(product(x, basis, HIGHEST)).sum(1)
  return values, _rest(_gram(x, x), values)


def _gram(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x.T y of every sample -> [b, d, d]."""
  return jnp.einsum("bni,bnj->bij", x, y, precision=HIGHEST)


def _rest(gram: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the sum of squares off the diagonal -> [b]."""
  return jnp.square(gram).sum((1, 2)) - jnp.square(values).sum(1)


@_diagonal.defjvp
def _diagonal_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> Any:
  (x, basis), (dx, dbasis) = primals, tangents
  # Compute the diagonal and its derivatives by x and by the basis, [b, d].
  gram = _gram(x, x)
  if x.shape[1] > x.shape[2]:
    # From x.T x, which the error needs anyway: one product of all tokens
    # backwards instead of three.
    y = product(gram, basis, HIGHEST)
    # A sum of squares, but for rounding.
    values = jnp.maximum((basis[None] * y).sum(1), 0)
    by_basis = 2 * (y * dbasis[None]).sum(1)
    # In this order: XLA transposes the gradient of what stands second.
    turned = product(_gram(dx, x), basis, HIGHEST)
    by_x = 2 * (basis[None] * turned).sum(1)
  else:
    y = product(x, basis, HIGHEST)
    values = jnp.square(y).sum(1)
    by_basis = 2 * (y * product(x, dbasis, HIGHEST)).sum(1)
    by_x = 2 * (y * product(dx, basis, HIGHEST)).sum(1)
  # The norm of the matrix is fixed under a rotation of the basis, so that
  # the error changes by the diagonal alone.
  change = by_x + by_basis, -2 * (values * by_basis).sum(1)
  return (values, _rest(gram, values)), change


def learned_sigma(s: jax.Array) -> jax.Array:
  """Returns one Sigma for all samples: s / max |s| -> float32 [1, d]."""
  return (s / _safe_divisor(jnp.abs(s).max()))[None]
