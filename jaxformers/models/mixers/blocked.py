"""Attention over a few blocks of keys: no n x n array is ever made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.mixers.softmax import weigh


class Keys(NamedTuple):
  """Keys that every query of a block sees.

  Attributes:
    k, v: [b, h, B, m, e], or B = 1 if all blocks share them.
    seen: bool, broadcasts to [b, h, B, s, m].
  """

  k: jax.Array
  v: jax.Array
  seen: jax.Array


def check_size(name: str, size: int) -> int:
  """Returns a block size; ValueError unless it is at least 1."""
  if size < 1:
    raise UserError(f"{name}={size}: a block has at least one token.")
  return size


def split(x: jax.Array, size: int, axis: int = 2) -> jax.Array:
  """Cuts an axis of n into [B, size], padded at the end by zeros (False)."""
  padding = [(0, 0)] * x.ndim
  padding[axis] = (0, -x.shape[axis] % size)
  x = jnp.pad(x, padding)
  return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def merge(x: jax.Array, n: int) -> jax.Array:
  """[b, h, B, s, e] -> [b, h, n, e], the padding of `split` cut off."""
  return x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :n]


def neighbours(x: jax.Array, before: int, after: int, axis: int) -> jax.Array:
  """Every block with those around it: [.., B, s, ..] -> [.., B, w s, ..].

  w = before + 1 + after; beyond the ends there are zeros (False). `axis` is
  that of the blocks.
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
  """One softmax over all the keys: q [b, h, B, s, e] -> [b, h, B, s, e]."""
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
  seen = [
    jnp.broadcast_to(part.seen, s.shape)
    for part, s in zip(keys, scores, strict=True)
  ]
  weights = weigh(jnp.concatenate(scores, -1), jnp.concatenate(seen, -1))
  weights = dropout(weights).astype(q.dtype)
  y, at = 0, 0
  for part in keys:
    m = part.k.shape[-2]
    y = y + jnp.matmul(weights[..., at : at + m], part.v)
    at += m
  return y
