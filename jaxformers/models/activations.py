"""Activations whose gradient comes from what they put out."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_jvp
def elu(x: jax.Array) -> jax.Array:
  """x where it is positive, exp(x) - 1 elsewhere, in the type of x.

  Right to half a unit in the last place of 1, where `jax.nn.elu` is right to
  one of the result, at two to three times the cost on CPUs; x near 0 is added
  to what is of order 1 in any case. The gradient, 1 + min(y, 0), needs the
  output y alone, so that the backward pass keeps no input and takes no
  exponential.
  """
  precise = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  low = jnp.exp(jnp.minimum(precise, 0)) - 1
  return jnp.where(precise > 0, precise, low).astype(x.dtype)


@elu.defjvp
def _elu_jvp(
  x: tuple[jax.Array], dx: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  y = elu(*x)
  return y, dx[0] * (1 + jnp.minimum(y, 0))
