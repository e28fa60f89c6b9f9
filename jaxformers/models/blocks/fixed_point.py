"""Residual branches undone by fixed-point iteration.

Source: Behrmann et al. 2019, https://arxiv.org/abs/1811.00995, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_STEPS = 64  # A rate below 1/2 needs 53 in float64.


def enough_steps(rate: float) -> int:
  """Returns how many steps float64 needs at a rate in [0, 1], with a reserve.

  A rate of 1, which none reaches, counts as 0.999.
  """
  eps = float(np.finfo(np.float64).eps)
  rate = min(max(rate, eps), 0.999)
  return math.ceil(math.log(eps) / math.log(rate)) + 8


def solve(
  y: jax.Array,
  branch: Callable[[jax.Array], jax.Array],
  rate: jax.Array | float,
  mask: jax.Array,
  *,
  max_steps: int = MAX_STEPS,
  dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the x with x + branch(x) = y, by iterating x = y - branch(x).

  A token is done when the error that is left, at most rate / (1 - rate) of its
  last step, is below two units in the last place of its norm; or when its steps
  no longer become shorter, which is where rounding begins. Each token is
  measured by itself, so that a large one does not end the work on the others.

  Args:
    y: [..., d].
    branch: function of x, with a Lipschitz constant of at most `rate` for each
      token, in the Euclidean norm.
    rate: in [0, 1).
    mask: [...], True at tokens that are waited for.
    max_steps: number of steps after which the iteration stops in any case.
    dtype: compute type of `branch`, that of y if None. What it rounds away is
      not iterated for.

  Returns:
    x, and the number of steps.
  """
  # Find the precision: rounding of y, or of the branch where it is coarser.
  eps = jnp.finfo(y.dtype).eps
  rate = jnp.maximum(jnp.asarray(rate, y.dtype), eps)
  unit = jnp.maximum(eps, rate * jnp.finfo(dtype or y.dtype).eps)
  unit = unit.astype(y.dtype)
  # Rounding keeps the steps from becoming smaller than a unit themselves.
  allowed = jnp.maximum(2 * unit * (1 - rate) / rate, unit)

  def is_running(state: tuple[Any, ...]) -> jax.Array:
    count, _, _, done = state
    return (count < max_steps) & ~done.all()

  def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
    count, x, last_step, done = state
    # Take a step of the iteration, and measure it for each token.
    following = y - branch(x).astype(y.dtype)
    step = jnp.linalg.norm(following - x, axis=-1)
    size = jnp.linalg.norm(following, axis=-1)
    # A token that is not finite is done: waiting would not mend it.
    done |= (step <= allowed * size) | ~(step < last_step)
    return count + 1, following, step, done

  # Start at x = y, with all padding done.
  start = (
    jnp.zeros((), jnp.int32),
    y,
    jnp.full(mask.shape, jnp.inf, y.dtype),
    ~mask,
  )
  count, x, _, _ = jax.lax.while_loop(is_running, iterate, start)
  return x, count
