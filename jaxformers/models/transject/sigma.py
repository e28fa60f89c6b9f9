"""Sigma, the diagonal matrix between U and V, from the tokens or learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.models.parallel import product

# Full float32 precision, also on accelerators, whose default is lower. It
# applies to products that cost d^2 per token, and d^3 per sample and expert.
HIGHEST = jax.lax.Precision.HIGHEST


def _safe_divisor(top: jax.Array) -> jax.Array:
  """Returns `top`, or 1 where `top` is 0, so that gradients stay finite."""
  return jnp.where(top > 0, top, 1)


def eigenvalues(
  x: jax.Array, basis: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns approximate eigenvalues of x.T x / n, and their error.

  Sigma is the diagonal of basis.T (x.T x / n) basis, which is the least-squares
  diagonal for this basis, divided by its maximum so that the norm of Sigma is
  1. (The paper asks for a "stochastic" x.T x, but x.T x has negative entries;
  only the norm is used.)

  The reconstruction error is the squared norm of the off-diagonal part of
  basis.T (x.T x / n) basis. The authors' code takes the mean over the d^2
  entries of x.T x, without the division by n; the error here is d^2 / n^2 times
  as large. The error has no gradient with respect to x, since that gradient
  would shrink the embedding. Thus it fits only the basis to the tokens.

  Args:
    x: embedded tokens, [b, n, d].
    basis: orthogonal matrix, float32 [d, d].
    mask: bool [b, n], True at tokens.

  Returns:
    Sigma, float32 [b, d] in [0, 1] with maximum 1 (0 for a sample without
    tokens), and the squared Frobenius reconstruction error, float32 [b].
  """
  # Set padding to 0, so that it adds nothing to the sums over tokens.
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  # Project x.T x on the basis, and divide by the number of tokens.
  values, error = _diagonal(x, basis)
  values = values / count[:, None]
  # Take the maximum by its index, as in `masked_max`.
  largest = jnp.take_along_axis(values, values.argmax(1, keepdims=True), 1)
  return values / _safe_divisor(largest), jnp.maximum(error, 0) / jnp.square(
    count
  )


@jax.custom_jvp
def _diagonal(x: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the diagonal of basis.T x.T x basis [b, d] and its error [b].

  The error is the squared norm of the off-diagonal part. It has no gradient
  with respect to x.

  Args:
    x: tokens, float32 [b, n, d].
    basis: orthogonal matrix, float32 [d, d].
  """
  # Without gradients the error is usually unused: compute values without x.T x.
  values = jnp.square(product(x, basis, HIGHEST)).sum(1)
  return values, _rest(_gram(x, x), values)


def _gram(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x.T y of every sample, [b, d, d]."""
  return jnp.einsum("bni,bnj->bij", x, y, precision=HIGHEST)


def _rest(gram: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the sum of the squares of off-diagonal entries, [b]."""
  return jnp.square(gram).sum((1, 2)) - jnp.square(values).sum(1)


@_diagonal.defjvp
def _diagonal_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> Any:
  (x, basis), (dx, dbasis) = primals, tangents
  # Compute the diagonal and its derivatives by x and by the basis, [b, d].
  gram = _gram(x, x)
  if x.shape[1] > x.shape[2]:
    # Use x.T x, which the error needs anyway. The backward pass then has one
    # product over all tokens instead of three.
    y = product(gram, basis, HIGHEST)
    # The values are sums of squares; rounding can make them negative.
    values = jnp.maximum((basis[None] * y).sum(1), 0)
    by_basis = 2 * (y * dbasis[None]).sum(1)
    # Keep dx first, since XLA transposes the gradient of the second argument.
    turned = product(_gram(dx, x), basis, HIGHEST)
    by_x = 2 * (basis[None] * turned).sum(1)
  else:
    y = product(x, basis, HIGHEST)
    values = jnp.square(y).sum(1)
    by_basis = 2 * (y * product(x, dbasis, HIGHEST)).sum(1)
    by_x = 2 * (y * product(dx, basis, HIGHEST)).sum(1)
  # A rotation of the basis does not change the norm of the matrix, so only the
  # change of the diagonal changes the error.
  change = by_x + by_basis, -2 * (values * by_basis).sum(1)
  return (values, _rest(gram, values)), change


def learned_sigma(s: jax.Array) -> jax.Array:
  """Returns Sigma = s / max |s|, which all samples share, float32 [1, d]."""
  return (s / _safe_divisor(jnp.abs(s).max()))[None]
