"""Landmarks among the tokens of a sample, and the inverse of their kernel.

The mixers nystromformer, skyformer and informer use these functions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.models.mixers.scores import HIGHEST
from jaxformers.models.reductions import largest

INVERSE_INITS = ("sample", "batch")


def tokens_first(mask: jax.Array) -> jax.Array:
  """Returns positions that list tokens in order, then padding, int32 [b, n]."""
  return jnp.argsort(~mask, axis=1, stable=True)


def ranks(place: jax.Array, total: jax.Array) -> jax.Array:
  """Returns the ranks of the tokens at given fractions of a sample.

  Args:
    place: fractions in [0, 1).
    total: number of tokens of each sample, in a shape that broadcasts with
      `place`; a sample without tokens gets rank 0.
  """
  rank = jnp.floor(place * total.astype(place.dtype)).astype(total.dtype)
  return jnp.minimum(rank, jnp.maximum(total - 1, 0))


def segments(mask: jax.Array, count: int, dtype: Any) -> jax.Array:
  """Returns weights that average equal runs of tokens, [b, count, n].

  Token r of t belongs to run floor(r count / t). If there are fewer tokens than
  runs, every token is a run, and the rows of the empty runs are 0.
  """
  # Number the tokens, and assign each to a run.
  total = mask.sum(1, keepdims=True)
  rank = jnp.cumsum(mask, 1) - 1
  runs = jnp.minimum(total, count)
  run = rank * runs // jnp.maximum(total, 1)
  # Give the tokens of a run equal weights with the sum 1.
  inside = (run[:, None] == jnp.arange(count)[None, :, None]) & mask[:, None]
  inside = inside.astype(dtype)
  return inside / jnp.maximum(inside.sum(-1, keepdims=True), 1)


def iterative_inverse(
  a: jax.Array, steps: int, init: str = "sample"
) -> jax.Array:
  """Approximates the pseudo-inverse of a [b, h, m, m] by matrix products.

  Iterates Z <- Z (13 - A Z (15 - A Z (7 - A Z))) / 4 from
  Z = A.T / (|A|_1 |A|_inf). The papers take six steps, which are too few to
  invert large kernels.

  Source: Xiong et al. 2021 (Nystromformer), https://arxiv.org/abs/2102.03902,
  equation 11.

  Args:
    a: float32 matrices without negative entries; rows and columns of 0 stay 0.
    steps: number of iterations.
    init: "sample" scales each matrix by its own norms. "batch" scales all
      matrices by the greatest column sum in the batch, as the reference
      implementations do for matrices whose rows sum to at most 1; the result of
      a sample then depends on the rest of its batch.

  Raises:
    UserError: if `steps` is below 1 or `init` is unknown.
  """
  choose("inverse_init", init, INVERSE_INITS)
  if steps < 1:
    raise UserError(f"inverse_steps={steps} is below 1: give 1 or more.")
  # Scale the transpose, so that the iteration converges.
  columns = largest(jnp.abs(a).sum(-2))[..., None, None]
  rows = largest(jnp.abs(a).sum(-1))[..., None, None]
  scale = largest(columns.ravel()) if init == "batch" else columns * rows
  z = jnp.swapaxes(a, -1, -2) / jnp.where(scale > 0, scale, 1)
  # Iterate at full precision: rounding errors grow with every step.
  eye = jnp.eye(a.shape[-1], dtype=a.dtype)[None, None]
  matmul = functools.partial(jnp.matmul, precision=HIGHEST)
  for _ in range(steps):
    az = matmul(a, z)
    inner = matmul(az, 15 * eye - matmul(az, 7 * eye - az))
    z = matmul(z, 13 * eye - inner) / 4
  return z
