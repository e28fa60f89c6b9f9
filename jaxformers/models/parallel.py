"""What models know of the mesh that they are traced on."""

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
  """Whether experts lie on several devices, by the mesh of the context."""
  return _mesh().shape.get(MODEL, 1) > 1


def _tokens_are_split() -> bool:
  """Whether the tokens of a sample lie on several devices."""
  return _mesh().shape.get(SEQUENCE, 1) > 1


def product(x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
  """x [b, n, d] times w [d, k] -> [b, n, k], all samples as one matrix.

  Else XLA on CPUs transposes what comes back to x for the gradient of w. Not
  where tokens are split over devices: they would change places.
  """
  if _tokens_are_split():
    return jnp.matmul(x, w, precision=precision)
  y = jnp.matmul(x.reshape(-1, x.shape[-1]), w, precision=precision)
  return y.reshape(*x.shape[:-1], w.shape[-1])


def whole_tokens(x: jax.Array) -> jax.Array:
  """x [b, n, d] between layers, where no token is split over devices.

  Else tokens would be split as the columns of what made them are, and gathered
  again for every expert.
  """
  if not experts_are_spread():
    return x
  free = PartitionSpec.UNCONSTRAINED
  sharding = NamedSharding(_mesh(), PartitionSpec(free, free, None))
  return jax.lax.with_sharding_constraint(x, sharding)
