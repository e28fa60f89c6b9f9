"""Packed rows: several examples behind each other in one row.

A row is described by the numbers of its examples, int32 [b, n]: 1, 2, ... in
their order, and 0 at padding. Inside an encoder, numbers take the place of the
mask, with negative numbers at masked tokens of an example. So every function
that takes a mask takes numbers, if the mixer says so by `has_segments`.

A model whose mixer or block does not support numbers reads its examples in
separate rows (`unpack`), which gives the same result more slowly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError


class Packed(NamedTuple):
  """Examples of packed rows.

  Attributes:
    numbers: number of the example of each token, int32 [b, n]; 0 at padding.
    most: greatest number of examples of a row, an int; 0 if unknown.
    longest: greatest number of tokens of an example, an int; 0 if unknown.
  """

  numbers: jax.Array
  most: int
  longest: int


def make(numbers: Any, sizes: tuple[int, int] | None) -> Packed:
  """Returns the examples of packed rows.

  Args:
    numbers: int [b, n]; see `Packed`.
    sizes: (most, longest) of `Packed`; None to read them from the numbers,
      which a compiled function cannot. They are 0 then.

  Raises:
    UserError: for numbers of another shape, in another order or beyond the
      sizes.
  """
  if isinstance(numbers, jax.core.Tracer):
    return Packed(numbers.astype(jnp.int32), *(sizes or (0, 0)))
  array = np.asarray(numbers)
  if array.ndim != 2 or array.dtype.kind not in "iu":
    raise UserError(
      f"segments have the shape {array.shape} and the type {array.dtype}: give "
      "integers [b, n], 1, 2, ... at the tokens of each example of a row."
    )
  # Numbers stay or grow by one, until 0 follows. A row that begins with another
  # number than 1 does not continue from a state: see `starts`.
  before, after = array[:, :-1], array[:, 1:]
  is_next = (after == before) | ((after == before + 1) & (before > 0))
  is_right = (is_next | (after == 0)).all(1) & (array >= 0).all(1)
  if not is_right.all():
    raise UserError(
      "segments must be 1, 2, ... in the order of the row, and 0 at padding: "
      f"a row has {array[~is_right][0, :8].tolist()}... Number the examples "
      "again."
    )
  counts = [np.bincount(row[row > 0]) for row in array]
  longest = max((int(count.max(initial=0)) for count in counts), default=0)
  needed = (int(array.max(initial=0)), longest)
  sizes = needed if sizes is None else sizes
  if needed[0] > sizes[0] or needed[1] > sizes[1]:
    raise UserError(
      f"A row has {needed[0]} examples of up to {needed[1]} tokens, but "
      f"sizes={sizes}: give greater sizes."
    )
  return Packed(jnp.asarray(array, jnp.int32), *sizes)


def is_packed(mask: jax.Array) -> bool:
  """Returns True for the numbers of packed rows, False for a mask."""
  return mask.dtype != jnp.bool_


def tokens(mask: jax.Array) -> jax.Array:
  """Returns a bool mask [b, n], True at tokens, from a mask or from numbers."""
  return mask > 0 if is_packed(mask) else mask


def starts(mask: jax.Array, *, reverse: bool = False) -> jax.Array | None:
  """Returns an array that is True where an example begins, bool [b, n].

  Returns None for a mask. The first position of a row is a start only if its
  number is not 1, so that example 1 continues from a state.

  Args:
    mask: mask or numbers.
    reverse: True for the order from the last token to the first.
  """
  if not is_packed(mask):
    return None
  numbers = jnp.abs(mask)
  if reverse:
    return jnp.pad(numbers[:, 1:] != numbers[:, :-1], ((0, 0), (0, 1)))
  before = jnp.pad(numbers[:, :-1], ((0, 0), (1, 0)), constant_values=1)
  # Padding at the end of a row belongs to its last example.
  return (numbers != before) & (numbers != 0)


def last_number(mask: jax.Array) -> jax.Array:
  """Returns the number of the last example of each row, int32 [b]."""
  return jnp.maximum(jnp.abs(mask).max(1), 1)


def scan_options(mask: jax.Array, *, reverse: bool = False) -> dict[str, Any]:
  """Returns `mask` and `resets`, the options of a scan; see `starts`."""
  return {"mask": tokens(mask), "resets": starts(mask, reverse=reverse)}


def places(numbers: jax.Array) -> jax.Array:
  """Returns the position of each token in its example, int32 [b, n], from 0."""
  index = jnp.arange(numbers.shape[1], dtype=jnp.int32)[None]
  begins: Any = starts(numbers)
  return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def check_sizes(packed: Packed) -> None:
  """Raises UserError for examples of unknown sizes."""
  if not packed.most:
    raise UserError(
      "Inside a compiled function, the packed rows of this model need "
      "sizes=(most, longest): the greatest number of examples of a row, and of "
      "tokens of an example."
    )


def unpack(packed: Packed, x: jax.Array) -> jax.Array:
  """Returns the examples of packed rows in separate rows.

  Args:
    packed: examples.
    x: tokens of the packed rows, [b, n, ...].

  Returns:
    The examples, [b most, longest, ...]; 0 behind the end of an example.

  Raises:
    UserError: for examples of unknown sizes.
  """
  check_sizes(packed)
  index, is_token = _index(packed)
  flat = index.reshape(len(index), -1)
  taken = jnp.take_along_axis(
    x, flat.reshape(*flat.shape, *(1,) * (x.ndim - 2)), 1, mode="clip"
  )
  taken = taken.reshape(-1, packed.longest, *x.shape[2:])
  keep = is_token.reshape(-1, packed.longest, *(1,) * (x.ndim - 2))
  return jnp.where(keep, taken, jnp.zeros((), x.dtype))


def repack(packed: Packed, y: jax.Array) -> jax.Array:
  """Inverts `unpack`: [b most, longest, ...] to [b, n, ...]; 0 at padding."""
  b, n = packed.numbers.shape
  y = y.reshape(b, -1, *y.shape[2:])
  numbers = packed.numbers
  index = (numbers - 1) * packed.longest + places(numbers)
  axes = (1,) * (y.ndim - 2)
  taken = jnp.take_along_axis(y, index.reshape(b, n, *axes), 1, mode="clip")
  keep = (numbers > 0).reshape(b, n, *axes)
  return jnp.where(keep, taken, jnp.zeros((), y.dtype))


def _index(packed: Packed) -> tuple[jax.Array, jax.Array]:
  """Returns the places of the tokens of all examples, and where there are any.

  Both are [b, most, longest].
  """
  numbers = packed.numbers[:, None]
  examples = jnp.arange(1, packed.most + 1, dtype=jnp.int32)[None, :, None]
  is_mine = numbers == examples
  first = is_mine.argmax(-1)[..., None]
  offset = jnp.arange(packed.longest, dtype=jnp.int32)[None, None]
  return first + offset, offset < is_mine.sum(-1)[..., None]
