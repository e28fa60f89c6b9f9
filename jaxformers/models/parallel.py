"""What models know of the mesh that they are traced on."""

from __future__ import annotations

import jax

MODEL = "model"  # The axis over which experts lie.
SEQUENCE = "sequence"  # The axis over which tokens lie.


def experts_are_spread() -> bool:
  """Whether experts lie on several devices, by the mesh of the context."""
  return jax.sharding.get_abstract_mesh().shape.get(MODEL, 1) > 1
