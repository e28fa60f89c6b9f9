"""Caps: projections of matrices to a greatest spectral norm after every step.

A kernel with m inputs and n outputs is kept at a spectral norm of at most
`most` sqrt(n / m), which is the norm `most` as a map between vectors whose
length is their root mean square. Rows of the embedding are kept at a root mean
square of at most 1. Rotations, biases and other parameters have no cap.

Source: Newhouse et al. 2025, https://arxiv.org/abs/2507.13338, section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformers.training.muon import split_axes

# Tables whose rows are vectors of tokens or of positions.
TABLE = re.compile(r"encoder/embedding/(tokens/embedding|positions)")
# Greatest norm, relative to the cap, for which the soft cap is monotone.
_STEEPEST = 1.3
_SQUARINGS = 6  # Of the Gram matrix, for a bound on the spectral norm.


def exact_cap(w: jax.Array, most: float) -> jax.Array:
  """Returns a matrix whose singular values are min(s, most).

  It is the nearest matrix of spectral norm at most `most`. Needs a singular
  value decomposition, which is slow on TPUs.

  Args:
    w: matrix, [m, n].
    most: greatest spectral norm.
  """
  u, s, v = jnp.linalg.svd(w, full_matrices=False)
  # Subtract what is too much: a matrix below the cap stays as it is.
  return w - (u * jnp.maximum(s - most, 0)) @ v


def norm_bound(w: jax.Array) -> jax.Array:
  """Returns an upper bound on the spectral norm of a matrix, in products only.

  It is the Schatten norm sum_i (s_i^p)^(1/p) with p = 128, which is at most
  r^(1/128) times the spectral norm for a matrix of rank r (1.033 for 64).

  Args:
    w: matrix, [m, n].
  """
  gram = w @ w.T if w.shape[0] < w.shape[1] else w.T @ w
  log = jnp.zeros((), w.dtype)
  # Divide by the trace before each product, to stay in the range of float32.
  for i in range(_SQUARINGS):
    trace = jnp.maximum(jnp.trace(gram), jnp.finfo(w.dtype).tiny)
    log += jnp.log(trace) / 2**i
    gram = gram / trace
    gram = gram @ gram
  log += jnp.log(jnp.trace(gram)) / 2**_SQUARINGS
  return jnp.exp(log / 2)


def soft_cap(w: jax.Array, most: float) -> jax.Array:
  """Returns a matrix of spectral norm at most `most`, in products only.

  With the bound k of `norm_bound`, W - a W W.T W is taken twice, once with a
  and once with -a, where a is the least number for which k becomes `most`. The
  map of singular values is monotone up to k = 1.3 `most`; a greater matrix is
  first multiplied by a number. A matrix with k below `most` stays as it is.

  Source: Newhouse et al. 2025, section 3.2 ("soft cap"). Differs from it: k is
  a bound on this matrix, not on all matrices that a step can reach.

  Args:
    w: matrix, [m, n].
    most: greatest spectral norm.
  """
  k = norm_bound(w)
  w = w * jnp.minimum(1, _STEEPEST * most / k)
  k = jnp.clip(k, most, _STEEPEST * most)
  # Find u = a k^2 by bisection: (1 - u) + u (1 - u)^3 falls up to u = 1/3.

  def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> Any:
    low, high = ends
    u = (low + high) / 2
    is_low = k * ((1 - u) + u * (1 - u) ** 3) > most
    return jnp.where(is_low, u, low), jnp.where(is_low, high, u)

  zero = jnp.zeros_like(k)
  _, u = jax.lax.fori_loop(0, 30, halve, (zero, zero + 1 / 3))
  a = jnp.where(k > most, u, 0) / k**2
  for sign in (-1, 1):
    w = w + sign * a * (w @ w.T @ w)
  return w


CAPS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
  "soft": soft_cap,
  "exact": exact_cap,
}


def cap_weights(kind: str, most: float) -> optax.GradientTransformation:
  """Returns a transformation whose updates lead to capped matrices.

  It must come last, after the learning rate.

  Args:
    kind: name of the cap, in `CAPS`.
    most: greatest norm, between vectors of root mean square 1.
  """
  function = CAPS[kind]

  def capped(path: Any, w: jax.Array) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if TABLE.fullmatch(name):
      size = jnp.sqrt(jnp.square(w).mean(-1, keepdims=True))
      return w / jnp.maximum(size, 1)
    split = split_axes(path, w)
    if split is None:
      return w
    m = math.prod(w.shape[:split])
    matrix = w.reshape(m, -1)
    limit = most * math.sqrt(matrix.shape[1] / m)
    return function(matrix, limit).reshape(w.shape)

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    moved = optax.apply_updates(params, updates)
    moved = jax.tree_util.tree_map_with_path(capped, moved)
    return jax.tree.map(jnp.subtract, moved, params), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update)
