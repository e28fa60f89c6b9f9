"""Softmax attention over blocks of keys, without an n x n array.

A helper of most mixers: `attend_to` and `sum_values` of those with a softmax
over sets of keys, `split` and `merge` of those that cut tokens into blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.scores import dot, hide
from jaxformers.models.parallel import row_sums


class Keys(NamedTuple):
  """Keys and values that the queries of each block attend to.

  Attributes:
    k, v: keys and values [..., m, e]; of blocks [b, h, B, m, e], with B = 1 if
      all blocks share them.
    seen: True where a query sees a key; broadcasts to [..., s, m].
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
  q: jax.Array, keys: Sequence[Keys], dropout: Dropout
) -> jax.Array:
  """Applies one softmax to several sets of keys: q, y [..., s, e]."""
  keys = [part for part in keys if part.k.shape[-2]]  # Sets may be empty.
  scale = q.shape[-1] ** -0.5
  scores = [hide(dot(q, part.k) * scale, part.seen) for part in keys]
  return sum_values(scores, [part.v for part in keys], dropout)


def sum_values(
  scores: Sequence[jax.Array], values: Sequence[jax.Array], dropout: Dropout
) -> jax.Array:
  """Returns the values of several sets of keys under one softmax.

  The sums of the values are divided by the sum of the weights, not the weights:
  so their gradients need no sum over the keys.

  Args:
    scores: float32 scores of each set, [..., s, m].
    values: values of each set, [..., m, e].
    dropout: dropout of the weights.

  Returns:
    [..., s, e] in the type of the values.
  """
  # Exponentiate below the maximum of all sets.
  tops = [s.max(-1, keepdims=True) for s in scores]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  # Sum weights and values over all sets.
  y: Any = 0  # Arrays from the first set on.
  total: Any = 0
  for number, (score, v) in enumerate(zip(scores, values, strict=True)):
    weights = jnp.exp(score - top)
    total = total + row_sums(weights)
    dropped = dropout.fold(number)(weights).astype(v.dtype)
    y = y + jnp.matmul(dropped, v, preferred_element_type=total.dtype)
  return (y / total).astype(values[0].dtype)
