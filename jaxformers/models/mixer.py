"""The mixer contract.

A mixer is a Linen module whose call is

    mixer(x, *, mask, carry, train) -> (y, carry)

with x and y [b, n, d] and mask [b, n], True at tokens. `carry` is any pytree
that one layer hands to the next; the first layer gets None. Every mixer keeps
three promises: values at masked positions never reach a token, a sample does
not depend on its batch mates, and appended padding changes nothing.

Most mixers are a function of heads: see `attention.attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry

MIXERS: Registry = Registry("mixer", is_open=True)


def names_with_step() -> list[str]:
  """Returns the names of the mixers that go on from a cache."""
  return [name for name in MIXERS if getattr(MIXERS[name], "has_step", False)]


def kernel_init(deviation: float) -> Callable[..., jax.Array]:
  """Returns the initializer of kernels: a normal one, or Xavier's.

  Args:
    deviation: standard deviation of the entries; 0 for Xavier's initializer.

  Raises:
    UserError: for a negative deviation.
  """
  if deviation < 0:
    raise UserError(
      f"init_std={deviation} is negative: give a standard deviation, or 0 for "
      "the default initializer."
    )
  if deviation:
    return nn.initializers.normal(deviation)
  return nn.initializers.xavier_uniform()


def check_heads(num_heads: int, d_model: int) -> None:
  """Raises UserError for a number of heads that does not divide d_model."""
  if num_heads < 1 or d_model % num_heads:
    raise UserError(
      f"num_heads={num_heads} does not divide d_model={d_model}: choose a "
      "number of heads that does."
    )
