"""Step sizes: how long the tokens of a state-space model last.

A token of step size s acts as if it stood s times in the sequence, where s need
not be an integer; 1 is the usual size. So a sequence that was sampled at
irregular times is read at its own times. `Model.apply` takes the step sizes,
and passes them to the mixers as a collection of variables.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError

STEP_SIZES = "step_sizes"  # Collection of the step sizes of each mixer.


def collection(sizes: jax.Array, num_layers: int) -> dict[str, Any]:
  """Returns the variables that give step sizes to all mixers of an encoder.

  Args:
    sizes: step sizes, [b, n].
    num_layers: number of layers of the encoder.
  """
  layers = {f"layer_{i}": {"mixer": {"s": sizes}} for i in range(num_layers)}
  return {STEP_SIZES: {"encoder": layers}}


def find(module: nn.Module) -> jax.Array | None:
  """Returns the step sizes [b, n] of a mixer; None if all tokens have size 1.

  Args:
    module: mixer, within its call.
  """
  return module.get_variable(STEP_SIZES, "s")


def check(sizes: Any, shape: tuple[int, ...]) -> jax.Array:
  """Returns step sizes as float32, or float64 if they are given so, [b, n].

  Args:
    sizes: step sizes. Only values outside of compiled functions are checked.
    shape: shape of the inputs.

  Raises:
    UserError: for another shape than the shape of the inputs, and for sizes
      that are negative or not finite.
  """
  if np.shape(sizes) != shape or len(shape) != 2:
    raise UserError(
      f"step_sizes have the shape {np.shape(sizes)} and the inputs {shape}: "
      "give a number for each token, [b, n]."
    )
  if not isinstance(sizes, jax.core.Tracer):
    array = np.asarray(sizes)
    is_wrong = ~(np.isfinite(array) & (array >= 0))
    if is_wrong.any():
      raise UserError(
        f"A step size is {array[is_wrong][0]}: give finite numbers from 0, "
        "where 1 is the usual size."
      )
  sizes = jnp.asarray(sizes)
  return sizes.astype(jnp.promote_types(sizes.dtype, jnp.float32))
