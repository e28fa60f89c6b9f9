"""Landmarks among the tokens of a sample, and the inverse of their kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.mixers.softmax import HIGHEST
from jaxformers.registry import choose

INVERSE_INITS = ("sample", "batch")


def tokens_first(mask: jax.Array) -> jax.Array:
  """The positions of a sample's tokens, in order, then the others: [b, n]."""
  return jnp.argsort(~mask, axis=1, stable=True)


def ranks(place: jax.Array, total: jax.Array) -> jax.Array:
  """Which of `total` tokens stand at fractions of them: integers.

  Args:
    place: in [0, 1).
    total: numbers of tokens, of a shape that broadcasts; 0 gives rank 0.
  """
  rank = jnp.floor(place * total.astype(place.dtype)).astype(total.dtype)
  return jnp.minimum(rank, jnp.maximum(total - 1, 0))


def segments(mask: jax.Array, count: int, dtype: Any) -> jax.Array:
  """Weights that average a sample's tokens in equal runs -> [b, count, n].

  The r-th of t tokens belongs to run floor(r count / t); with fewer tokens than
  runs every token is a run of its own, and rows of empty runs are 0.
  """
  total = mask.sum(1, keepdims=True)
  rank = jnp.cumsum(mask, 1) - 1
  runs = jnp.minimum(total, count)
  run = rank * runs // jnp.maximum(total, 1)
  inside = (run[:, None] == jnp.arange(count)[None, :, None]) & mask[:, None]
  inside = inside.astype(dtype)
  return inside / jnp.maximum(inside.sum(-1, keepdims=True), 1)


def iterative_inverse(
  a: jax.Array, steps: int, init: str = "sample"
) -> jax.Array:
  """The pseudo-inverse of a [b, h, m, m], approximately: a few products.

  Z <- Z (13 - A Z (15 - A Z (7 - A Z))) / 4 from Z = A.T / (|A|_1 |A|_inf). Six
  steps, as the papers have, leave large kernels far from inverted.

  Source: Xiong et al. 2021 (Nystromformer), https://arxiv.org/abs/2102.03902,
  equation 11.

  Args:
    a: float32, entries not negative; rows and columns of 0 stay out.
    steps: number of iterations.
    init: "sample" scales each matrix by its own norms; "batch" all by the
      greatest column sum in the batch, as the released codes do for matrices
      whose rows sum to at most 1: then a result depends on the batch mates.

  Raises:
    UserError: for less than one step or another init.
  """
  choose("inverse_init", init, INVERSE_INITS)
  if steps < 1:
    raise UserError(f"inverse_steps={steps}: at least one step is needed.")
  columns = jnp.max(jnp.abs(a).sum(-2), -1)[..., None, None]
  rows = jnp.max(jnp.abs(a).sum(-1), -1)[..., None, None]
  scale = columns.max() if init == "batch" else columns * rows
  z = jnp.swapaxes(a, -1, -2) / jnp.where(scale > 0, scale, 1)
  eye = jnp.eye(a.shape[-1], dtype=a.dtype)[None, None]
  by = functools.partial(jnp.matmul, precision=HIGHEST)
  for _ in range(steps):
    az = by(a, z)
    z = by(z, 13 * eye - by(az, 15 * eye - by(az, 7 * eye - az))) / 4
  return z
