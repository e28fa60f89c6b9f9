"""The mesh that models are traced on, as far as they know it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

MODEL = "model"  # The axis over which experts lie.
SEQUENCE = "sequence"  # The axis over which tokens lie.


def _mesh() -> jax.sharding.AbstractMesh:
  return jax.sharding.get_abstract_mesh()


def experts_are_spread() -> bool:
  """Returns True if experts lie on several devices of the context's mesh."""
  return _mesh().shape.get(MODEL, 1) > 1


def _tokens_are_split() -> bool:
  """Returns True if the tokens of a sample lie on several devices."""
  return _mesh().shape.get(SEQUENCE, 1) > 1


def product(x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
  """Returns x [b, n, d] times w [d, k] -> [b, n, k], samples as one matrix.

  Otherwise XLA on CPUs transposes the gradient of x for that of w. Tokens that
  are split over devices stay apart: they would change places.
  """
  if _tokens_are_split():
    return jnp.matmul(x, w, precision=precision)
  y = jnp.matmul(x.reshape(-1, x.shape[-1]), w, precision=precision)
  return y.reshape(*x.shape[:-1], w.shape[-1])


def whole_tokens(x: jax.Array) -> jax.Array:
  """Returns x [b, n, d] with the channels of a token on one device.

  Otherwise tokens between layers would be split as the columns of the matrix
  that made them, and gathered again for every expert.
  """
  if not experts_are_spread():
    return x
  free = PartitionSpec.UNCONSTRAINED
  sharding = NamedSharding(_mesh(), PartitionSpec(free, free, None))
  return jax.lax.with_sharding_constraint(x, sharding)
