"""Random arrays drawn by NumPy; JAX would compile a program for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, shape, dtype=np.float32):
  """Draws normal numbers; `dtype=float` is float64 if x64 is enabled."""
  values = np.random.default_rng(seed).normal(size=shape)
  return jax.device_put(values.astype(jnp.result_type(dtype)))


def uniform(seed, shape, low=0.0, high=1.0):
  """Draws uniform numbers in [low, high)."""
  values = np.random.default_rng(seed).uniform(low, high, shape)
  return jax.device_put(values.astype(np.float32))


def integers(seed, shape, low, high, *, end=None):
  """Draws integers in [low, high); the second row is 0 from `end` on."""
  values = np.random.default_rng(seed).integers(low, high, shape, np.int32)
  if end is not None:
    values[1, ..., end:] = 0
  return jax.device_put(values)
