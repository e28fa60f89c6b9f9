"""Softmax attention over blocks of keys, without an n x n array.

Mixers with a softmax over several sets of keys use `attend_to` and
`sum_values`. Mixers that cut the tokens into blocks use `split` and `merge`.
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
    k, v: keys and values [..., m, e]; with blocks [b, h, B, m, e], where B = 1
      if all blocks share the keys.
    seen: True where a query sees a key; broadcasts to [..., s, m].
  """

  k: jax.Array
  v: jax.Array
  seen: jax.Array


def check_size(name: str, size: int) -> int:
  """Returns the block size; raises UserError if it is below 1."""
  if size < 1:
    raise UserError(f"{name}={size} is below 1: give a number of tokens.")
  return size


def split(x: jax.Array, size: int, axis: int = 2) -> jax.Array:
  """Cuts an axis of n into blocks [B, size], padded with zeros (False)."""
  padding = [(0, 0)] * x.ndim
  padding[axis] = (0, -x.shape[axis] % size)
  x = jnp.pad(x, padding)
  return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def merge(x: jax.Array, n: int) -> jax.Array:
  """Inverts `split`: joins blocks [..., B, s, e] to tokens [..., n, e]."""
  return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., :n, :]


def neighbours(x: jax.Array, before: int, after: int, axis: int) -> jax.Array:
  """Joins each block with its neighbours: [.., B, s, ..] -> [.., B, w s, ..].

  Neighbours beyond the ends are zeros (False).

  Args:
    x: blocks.
    before, after: number of neighbours on each side; w = before + 1 + after.
    axis: axis of the blocks.
  """
  blocks = x.shape[axis]
  padding = [(0, 0)] * x.ndim
  padding[axis] = (before, after)
  padded = jnp.pad(x, padding)
  # Concatenate one shifted copy per neighbour.
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
  """Returns the attention [..., s, e] of queries q to several sets of keys.

  One softmax is over the keys of all sets. q has the shape [..., s, e].
  """
  keys = [part for part in keys if part.k.shape[-2]]  # Drop empty sets.
  scale = q.shape[-1] ** -0.5
  scores = [hide(dot(q, part.k) * scale, part.seen) for part in keys]
  return sum_values(scores, [part.v for part in keys], dropout)


def sum_values(
  scores: Sequence[jax.Array], values: Sequence[jax.Array], dropout: Dropout
) -> jax.Array:
  """Returns the mean of the values of several sets of keys under one softmax.

  The weighted sum of the values is divided by the sum of the weights. The
  weights themselves are not divided, so their gradients need no sum over keys.

  Args:
    scores: float32 scores of each set, [..., s, m].
    values: values of each set, [..., m, e].
    dropout: dropout of the weights.

  Returns:
    Means [..., s, e] in the dtype of the values.
  """
  # Find the maximum score of each query over all sets.
  tops = [s.max(-1, keepdims=True) for s in scores]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  # Sum weights and weighted values over all sets.
  y: Any = 0  # `y` and `total` are arrays after the first set.
  total: Any = 0
  for number, (score, v) in enumerate(zip(scores, values, strict=True)):
    weights = jnp.exp(score - top)
    total = total + row_sums(weights)
    dropped = dropout.fold(number)(weights).astype(v.dtype)
    y = y + jnp.matmul(dropped, v, preferred_element_type=total.dtype)
  return (y / total).astype(values[0].dtype)
