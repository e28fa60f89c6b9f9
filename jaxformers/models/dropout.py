"""Dropout of the entries of any array, from random bytes.

On a CPU, drawing random numbers takes longer than the rest of a small layer.
So every random word of 32 bits decides about four entries, a byte each. An
entry is kept if its byte is below a threshold, so the probability is a multiple
of 1/256. Each call draws one of the two thresholds next to the requested rate
at random. On average over the calls, an entry is dropped with exactly the
requested probability.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError


def draw_kept(
  key: jax.Array,
  rate: float,
  shape: Sequence[int],
  numbers: jax.Array | None = None,
) -> jax.Array:
  """Returns a mask that is True with probability 1 - rate, bool [*shape].

  The probability is over the keys. For one key, entries are independent, with a
  rate that differs from `rate` by less than 1/256.

  Args:
    key: random key from `jax.random.split` or `fold_in`, whose bits are random.
    rate: probability that an entry is dropped, in [0, 1).
    shape: shape of the result, with at least one axis, or two with `numbers`.
    numbers: numbers of the rows, [shape[0]], to draw each row from a key of its
      own; None for one key, or on TPUs for numbers from 0 where n / 4 words
      fill vectors.
  """
  *rows, n = shape
  # Draw at most three axes of rows, with the same bits of threefry: with more
  # axes, a TPU would sum the counters of the draw over the devices.
  if len(rows) > 3:
    rows = [*rows[:2], math.prod(rows[2:])]
  # Cut each word of 32 bits into four bytes.
  is_apart, size = _fills_lanes(n), -(-n // 4)
  if numbers is None and is_apart and rows:
    numbers = jnp.arange(rows[0])
  words = _draw_words(key, (*rows, size), numbers)
  if is_apart:
    # The first bytes of all words come first: bytes side by side would need a
    # copy of four times the words.
    parts = [(words >> shift) & 255 for shift in (0, 8, 16, 24)]
    drawn = jnp.concatenate(parts, -1).astype(jnp.int32)[..., :n]
  else:
    drawn = jax.lax.bitcast_convert_type(words, jnp.uint8)
    drawn = drawn.reshape(*rows, -1)[..., :n]
  # Round 256 (1 - rate) up or down at random, without bias. Use the bits of the
  # key, because a second draw would double the time to compile.
  up = (jax.random.key_data(key)[-1] >> 8).astype(jnp.float32) / 2**24
  threshold = jnp.floor(256 * (1 - rate) + up)
  return (drawn < threshold.astype(jnp.int32)).reshape(shape)


def _draw_words(
  key: jax.Array, shape: tuple[int, ...], numbers: jax.Array | None
) -> jax.Array:
  """Returns random words, uint32 [*shape], from a key for each row or from one.

  Args:
    key: random key.
    shape: shape of the result.
    numbers: numbers of the rows, to make a key for each; None for one key.
  """
  draw = functools.partial(jax.random.bits, dtype=jnp.uint32)
  if numbers is None:
    return draw(key, shape)
  # With a key for every row, devices exchange no counters of the draw.
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))
  return jax.vmap(lambda k: draw(k, shape[1:]))(keys(numbers))


def _fills_lanes(n: int) -> bool:
  """Returns True on a TPU if n / 4 words fill its vectors of 128 numbers."""
  return platforms.on_tpu() and n % 512 == 0


@flax.struct.dataclass
class Dropout:
  """Dropout with a random key, as a pytree that kernels can take.

  Attributes:
    rate: share of the entries that are dropped.
    key: random key; None to drop nothing.
    rows: numbers of the rows of arrays, int32 [b]: see `for_rows`.
  """

  rate: float = flax.struct.field(pytree_node=False, default=0.0)
  key: jax.Array | None = None
  rows: jax.Array | None = None

  def for_rows(self, rows: jax.Array) -> Dropout:
    """Returns dropout with another key for each row of an array.

    Args:
      rows: numbers of the rows, int32 [b].
    """
    if self.key is None:
      return self
    return dataclasses.replace(self, rows=rows)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x with random entries 0 and the others divided by 1 - rate."""
    if self.key is None:
      return x
    kept = draw_kept(self.key, self.rate, x.shape, self.rows)
    return jnp.where(kept, x / (1 - self.rate), 0)

  def fold(self, number: jax.Array | int) -> Dropout:
    """Returns dropout with another key, for part `number` of an array."""
    if self.key is None:
      return self
    return dataclasses.replace(self, key=jax.random.fold_in(self.key, number))


def make_dropout(module: nn.Module, rate: float, *, train: bool) -> Dropout:
  """Returns dropout with a new key of a module; outside training, no dropout.

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
  """Drops channels of x [b, n, d], the same channels at all tokens of a sample.

  Source: code of the authors of S4, S5 and the LRU.
  """
  # Draw one factor for each sample and channel, [b, 1, d].
  kept = make_dropout(module, rate, train=train)(
    jnp.ones((x.shape[0], 1, x.shape[2]), x.dtype)
  )
  return x * kept
