"""Softmax attention over blocks of keys, without an n x n array.

A helper of local, sparse, longformer, bigbird, linear, performer, reformer and
flash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.mixers.scores import weigh


class Keys(NamedTuple):
  """Keys and values that the queries of each block attend to.

  Attributes:
    k, v: keys and values [b, h, B, m, e]; B = 1 if all blocks share them.
    seen: True where a query sees a key; broadcasts to [b, h, B, s, m].
  """

  k: jax.Array
  v: jax.Array
  seen: jax.Array


def check_size(name: str, size: int) -> int:
  """Returns a block size; UserError unless it is at least 1."""
  if size < 1:
    raise UserError(f"{name}={size} is below 1: give a number of tokens.")
  return size


def split(x: jax.Array, size: int, axis: int = 2) -> jax.Array:
  """Cuts an axis of n into blocks [B, size], with zeros (False) at the end."""
  padding = [(0, 0)] * x.ndim
  padding[axis] = (0, -x.shape[axis] % size)
  x = jnp.pad(x, padding)
  return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def merge(x: jax.Array, n: int) -> jax.Array:
  """Undoes `split`: joins blocks [..., B, s, e] to tokens [..., n, e]."""
  return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., :n, :]


def neighbours(x: jax.Array, before: int, after: int, axis: int) -> jax.Array:
  """Joins each block with its neighbours: [.., B, s, ..] -> [.., B, w s, ..].

  Beyond the ends stand zeros (False).

  Args:
    x: blocks.
    before, after: number of neighbours on each side; w = before + 1 + after.
    axis: axis of the blocks.
  """
  blocks = x.shape[axis]
  padding = [(0, 0)] * x.ndim
  padding[axis] = (before, after)
  padded = jnp.pad(x, padding)
  return jnp.concatenate(
    [
      jax.lax.slice_in_dim(padded, i, i + blocks, axis=axis)
      for i in range(before + 1 + after)
    ],
    axis + 1,
  )


def attend_to(
  q: jax.Array,
  keys: Sequence[Keys],
  dropout: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """Applies one softmax to several sets of keys: q, y [b, h, B, s, e]."""
  # Score each set of keys.
  scale = q.shape[-1] ** -0.5
  scores = [
    jnp.matmul(
      q,
      jnp.swapaxes(part.k, -1, -2),
      preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
    )
    * scale
    for part in keys
  ]
  # Normalise over all sets together.
  seen = [
    jnp.broadcast_to(part.seen, s.shape)
    for part, s in zip(keys, scores, strict=True)
  ]
  weights = weigh(jnp.concatenate(scores, -1), jnp.concatenate(seen, -1))
  weights = dropout(weights).astype(q.dtype)
  # Sum the values of each set, which owns `size` columns of the weights.
  y, start = 0, 0
  for part in keys:
    size = part.k.shape[-2]
    y = y + jnp.matmul(weights[..., start : start + size], part.v)
    start += size
  return y
