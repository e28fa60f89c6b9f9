"""Contract of mixers, and their registry.

A mixer is a Linen module with the call

    mixer(x, *, mask, carry, train) -> (y, carry)

where x and y are [b, n, d], and mask is [b, n], True at tokens. `carry` is any
pytree that a layer passes to the next layer; the first layer gets None. Every
mixer has three properties. Values at masked positions do not affect tokens. A
sample does not depend on the other samples of its batch. Appended padding does
not change the result at tokens.

A mixer with a Lipschitz constant has the attributes `is_bounded`; `gain`, the
constant as a function of the collections of the mixer; and `distance`, to which
the constant applies: "sequences", the Frobenius norm of the difference of two
sequences, or "farthest", the greatest distance of two tokens at one place.

Most mixers are functions of heads: see `attention.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry

MIXERS: Registry = Registry("mixer", is_open=True)
# Distances of two sequences to which a Lipschitz constant can apply.
DISTANCES = ("sequences", "farthest")
# Mixers with weights for each position, distance or block of tokens: weights
# beyond the length of training stay untrained.
POSITION_WEIGHTS = frozenset({"linformer", "mega", "sinkhorn", "synthesizer"})


def names_with_step() -> list[str]:
  """Returns the names of the mixers that can continue from a cache."""
  return [name for name in MIXERS if getattr(MIXERS[name], "has_step", False)]


def bounded_distance(mixer: Any) -> str:
  """Returns the distance of a mixer's Lipschitz constant, or "" without one.

  Args:
    mixer: unbound mixer.

  Raises:
    UserError: for a bounded mixer that does not declare its distance.
  """
  if not getattr(mixer, "is_bounded", False):
    return ""
  distance = getattr(mixer, "distance", "")
  if distance not in DISTANCES:
    raise UserError(
      f"The mixer {type(mixer).__name__} is bounded, and its `distance` is "
      f"{distance!r}: declare one of {', '.join(DISTANCES)}, for which `gain` "
      "holds."
    )
  return distance


def kernel_init(deviation: float) -> Callable[..., jax.Array]:
  """Returns an initializer of kernels: normal, or Xavier's uniform one.

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
      "divisor of d_model."
    )
