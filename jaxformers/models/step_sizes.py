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


def make_collection(sizes: jax.Array, num_layers: int) -> dict[str, Any]:
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


def check(sizes: Any, shape: tuple[int, ...], mask: jax.Array) -> jax.Array:
  """Returns step sizes [b, n] as floats, 1 at padding.

  Args:
    sizes: step sizes. Only values outside of compiled functions are checked.
    shape: shape of the inputs.
    mask: bool [b, n], True at tokens.

  Raises:
    UserError: for another shape than the shape of the inputs, for sizes that
      are no real numbers, and for sizes of tokens that are negative or not
      finite.
  """
  try:
    array = sizes if isinstance(sizes, jax.Array) else np.asarray(sizes)
  except ValueError:  # Rows of different lengths.
    array = np.zeros((), object)
  is_real = any(
    jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)
  )
  if array.shape != shape or not is_real:
    raise UserError(
      f"step_sizes have the shape {array.shape} and the type {array.dtype}, "
      f"and the inputs the shape {shape}: give a number for each token, [b, n]."
    )
  with np.errstate(over="ignore"):
    array = jnp.asarray(array)
  array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
  # Sizes at padding have no effect: they may even be NaN.
  array = jnp.where(mask, array, 1)
  if not isinstance(array, jax.core.Tracer):
    values = np.asarray(array)
    is_wrong = ~(np.isfinite(values) & (values >= 0))
    if is_wrong.any():
      raise UserError(
        f"A step size is {values[is_wrong][0]}: give finite numbers from 0, "
        "where 1 is the usual size."
      )
  return array
