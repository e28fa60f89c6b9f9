"""Dropout, of the entries of any array, from random bytes.

A random number takes longer than the rest of a small layer on a CPU, so every
random word of 32 bits decides on four entries. A byte is less than one of 256
thresholds with a probability that is a multiple of 1/256. Each call therefore
takes one of the two thresholds that are next to the rate asked for, at random,
so that over all calls an entry is dropped with exactly that probability.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError


def draw_kept(key: jax.Array, rate: float, shape: Sequence[int]) -> jax.Array:
  """Returns which entries are kept, bool of a shape, at probability 1 - rate.

  The probability is over the keys: entries are independent given the threshold,
  which is that of a rate less than 1/256 above or below.

  Args:
    key: random key from `jax.random.split` or `fold_in`, whose bits are random.
    rate: probability that an entry is dropped, in [0, 1).
    shape: shape of the result, of at least one axis.
  """
  *rows, n = shape
  # Take four bytes of each word.
  words = jax.random.bits(key, (*rows, -(-n // 4)), jnp.uint32)
  drawn = jax.lax.bitcast_convert_type(words, jnp.uint8)
  drawn = drawn.reshape(*rows, -1)[..., :n]
  # Round 256 (1 - rate) up or down by the bits of the key, to its value on
  # average. Another draw would take as long to compile as the first.
  up = (jax.random.key_data(key)[-1] >> 8).astype(jnp.float32) / 2**24
  threshold = jnp.floor(256 * (1 - rate) + up)
  return drawn < threshold.astype(jnp.int32)


@flax.struct.dataclass
class Dropout:
  """Dropout with a key; a pytree, so that kernels can take it.

  Attributes:
    rate: share of the entries that are dropped.
    key: random key; None to drop nothing.
  """

  rate: float = flax.struct.field(pytree_node=False, default=0.0)
  key: jax.Array | None = None

  def __call__(self, x: jax.Array) -> jax.Array:
    """Drops entries of any array, and scales the others by 1 / (1 - rate)."""
    if self.key is None:
      return x
    return jnp.where(
      draw_kept(self.key, self.rate, x.shape), x / (1 - self.rate), 0
    )

  def fold(self, number: jax.Array | int) -> Dropout:
    """Returns the dropout of one part of an array, with a key of its own."""
    if self.key is None:
      return self
    return dataclasses.replace(self, key=jax.random.fold_in(self.key, number))


def make_dropout(module: nn.Module, rate: float, *, train: bool) -> Dropout:
  """Returns dropout with a new key of a module; of nothing outside training.

  Raises:
    UserError: for a rate outside [0, 1).
  """
  if not 0 <= rate < 1:
    raise UserError(
      f"dropout_rate={rate} is not in [0, 1): give the share of entries to "
      "drop, or 0."
    )
  if not train or not rate:
    return Dropout()
  return Dropout(rate, module.make_rng("dropout"))


def drop_channels(
  module: nn.Module, x: jax.Array, rate: float, *, train: bool
) -> jax.Array:
  """Drops channels of samples at all of their tokens, x [b, n, d].

  Source: the dropout of S4's, S5's and the LRU's authors.
  """
  kept = make_dropout(module, rate, train=train)(
    jnp.ones((x.shape[0], 1, x.shape[2]), x.dtype)
  )
  return x * kept
