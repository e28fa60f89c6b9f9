"""Inverse of residual branches by fixed-point iteration.

Source: Behrmann et al. 2019, https://arxiv.org/abs/1811.00995, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Length = Callable[[jax.Array], jax.Array]
MAX_STEPS = 64  # A Lipschitz constant below 1/2 needs 53 in float64.


def enough_steps(rate: float) -> int:
  """Returns a number of steps that suffices in float64.

  The error falls by a factor of `rate` in every step. The result is
  log(eps) / log(rate), plus a reserve of 8.

  Args:
    rate: Lipschitz constant in [0, 1]. Values above 0.999 count as 0.999.
  """
  # Solve rate^steps = eps for the number of steps.
  eps = float(np.finfo(np.float64).eps)
  rate = min(max(rate, eps), 0.999)
  return math.ceil(math.log(eps) / math.log(rate)) + 8


def token_norms(x: jax.Array) -> jax.Array:
  """Returns the norm of each token, [b, n, d] -> [b, n]."""
  return jnp.linalg.norm(x, axis=-1)


def sequence_norms(x: jax.Array) -> jax.Array:
  """Returns the Frobenius norm of each sequence, [b, n, d] -> [b]."""
  return jnp.sqrt(jnp.square(x).sum((-2, -1)))


def greatest_norms(x: jax.Array) -> jax.Array:
  """Returns the greatest norm of a token of each sequence, [b, n, d] -> [b]."""
  return token_norms(x).max(-1)


# Lengths of the difference of two sequences; see `invertible`'s certificates.
LENGTHS: dict[str, Length] = {
  "sequences": sequence_norms,
  "farthest": greatest_norms,
}


def solve(
  y: jax.Array,
  branch: Callable[[jax.Array], jax.Array],
  rate: jax.Array | float,
  mask: jax.Array,
  *,
  max_steps: int = MAX_STEPS,
  dtype: Any = None,
  length: Length = token_norms,
) -> tuple[jax.Array, jax.Array]:
  """Returns the x with x + branch(x) = y, by iterating x = y - branch(x).

  The remaining error of a token is at most rate / (1 - rate) times its last
  step. A token has converged when this error is below two units in the last
  place of its norm. It has also converged when its steps stop shrinking,
  because then rounding dominates. Each token is tested separately, so that a
  large token does not end the iteration of the others.

  Args:
    y: right-hand sides, [..., d].
    branch: function of x, whose Lipschitz constant is at most `rate`, for each
      token in the Euclidean norm.
    rate: Lipschitz constant in [0, 1).
    mask: [...], True at tokens that must converge.
    max_steps: greatest number of steps.
    dtype: compute type of `branch`; None for the type of y. The iteration does
      not continue below the rounding of this type.
    length: norm in which `branch` has its Lipschitz constant, from [..., d] to
      the shape of `mask`; `sequence_norms` or `greatest_norms` for branches
      that mix tokens, with a mask of sequences.

  Returns:
    x, [..., d], and the number of steps.
  """
  # Compute the precision: rounding of y, or of the branch if it is coarser.
  eps = jnp.finfo(y.dtype).eps
  rate = jnp.maximum(jnp.asarray(rate, y.dtype), eps)
  unit = jnp.maximum(eps, rate * jnp.finfo(dtype or y.dtype).eps)
  unit = unit.astype(y.dtype)
  # Allow steps of one unit, because rounding prevents smaller steps.
  allowed = jnp.maximum(2 * unit * (1 - rate) / rate, unit)

  def is_running(state: tuple[Any, ...]) -> jax.Array:
    count, _, _, done = state
    return (count < max_steps) & ~done.all()

  def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
    count, x, last_step, done = state
    # Take a step x = y - branch(x), and compute its length for each token.
    following = y - branch(x).astype(y.dtype)
    step, size = length(following - x), length(following)
    # Test convergence. Tokens that are not finite stop too.
    done |= (step <= allowed * size) | ~(step < last_step)
    return count + 1, following, step, done

  # Start at x = y, and treat padding as converged.
  start = (
    jnp.zeros((), jnp.int32),
    y,
    jnp.full(mask.shape, jnp.inf, y.dtype),
    ~mask,
  )
  count, x, _, _ = jax.lax.while_loop(is_running, iterate, start)
  return x, count
