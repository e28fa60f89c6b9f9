"""The registry of blocks, and the norm that they share."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.registry import Registry

BLOCKS: Registry = Registry("block")


def layer_norm(x: jax.Array, name: str, epsilon: float = 1e-5) -> jax.Array:
  """Returns LayerNorm(x) of x, float32 [b, n, d], inside a module."""
  return nn.LayerNorm(epsilon, dtype=jnp.float32, name=name)(x)
