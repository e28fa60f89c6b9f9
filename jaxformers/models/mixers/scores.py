"""Scores of queries and keys, and the softmax over visible keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.models.segments import is_packed, tokens

# Precision of products whose rounding errors are amplified later. By default
# accelerators compute float32 products at a lower precision.
HIGHEST = jax.lax.Precision.HIGHEST


def dot(q: jax.Array, k: jax.Array, precision: Any = None) -> jax.Array:
  """Returns q k.T in at least float32, [..., n, m].

  Args:
    q: queries, [..., n, e].
    k: keys, [..., m, e].
    precision: precision of the product; None for the default.
  """
  return jnp.einsum(
    "...ne,...me->...nm",
    q,
    k,
    precision=precision,
    preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
  )


def weigh(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns the softmax of scores [..., n, m] over the visible keys.

  Args:
    scores: float32 scores, [..., n, m].
    seen: True where a query sees a key; has the rank of the scores, with axes
      of size 1 to broadcast. A query that sees no key gets uniform weights.
  """
  return jax.nn.softmax(hide(scores, seen), axis=-1)


def hide(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Sets the scores of masked keys to the lowest finite number."""
  # The softmax of a row of -inf would be NaN.
  return jnp.where(seen, scores, jnp.finfo(scores.dtype).min)


def exp_below_one(x: jax.Array) -> jax.Array:
  """Returns exp(min(x, 0))."""
  # `jnp.minimum` would halve the gradient at 0.
  return jnp.exp(jnp.where(x > 0, 0, x))


def earlier(
  n: int, m: int | None = None, start: jax.Array | int = 0
) -> jax.Array:
  """Returns the causal mask: True where key j <= query start + i, [n, m or n].

  Args:
    n: number of queries.
    m: number of keys; None for n.
    start: index of the first query.
  """
  return start + jnp.arange(n)[:, None] >= jnp.arange(m or n)[None]


def seen_keys(mask: jax.Array, causal: bool) -> jax.Array:
  """Returns the mask of visible keys: [b, 1, 1, n]; causal [b, 1, n, n].

  Args:
    mask: mask or numbers of packed rows, [b, n]; with numbers, the result is
      [b, 1, n, n], and a query sees the keys of the same example.
    causal: True if a query sees only keys up to its own.
  """
  seen = tokens(mask)[:, None, None]
  if is_packed(mask):
    numbers = jnp.abs(mask)
    seen = seen & (numbers[:, None, :, None] == numbers[:, None, None])
  return seen & earlier(mask.shape[1])[None, None] if causal else seen
