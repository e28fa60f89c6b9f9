"""Caps: projections of matrices to a greatest spectral norm after every step.

A kernel with m inputs and n outputs is kept at a spectral norm of at most
`most` sqrt(n / m), which is the norm `most` as a map between vectors whose
length is their root mean square. Rows of tables of the embedding are kept at a
root mean square of at most 1. Rotations, biases, heads and frozen parts have no
cap, and neither have averages of the parameters over steps.

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

from jaxformers.foundations.errors import UserError
from jaxformers.orthogonal.products import dot
from jaxformers.training.muon import split_axes

# Tables whose rows are vectors of tokens or of positions.
TABLE = re.compile(
  r"encoder/embedding/(tokens/embedding|positions|segments|cls)"
)
# Greatest norm, relative to the cap, for which the soft cap is monotone.
_STEEPEST = 1.3
# Number of times that the Gram matrix is squared to bound the spectral norm.
_SQUARINGS = 6


def exact_cap(w: jax.Array, most: float) -> jax.Array:
  """Returns a matrix whose singular values are min(s, most).

  It is the nearest matrix of spectral norm at most `most`. Needs a singular
  value decomposition, which is slow on TPUs, and whose rounding on an H100
  leaves norms of up to 1.0001 `most`.

  Args:
    w: matrix, [m, n].
    most: greatest spectral norm.
  """
  u, s, v = jnp.linalg.svd(w, full_matrices=False)
  # Subtract what is too much: a matrix below the cap stays as it is.
  return w - dot(u * jnp.maximum(s - most, 0), v)


def norm_bound(w: jax.Array) -> jax.Array:
  """Returns an upper bound on the spectral norm of a matrix, in products only.

  It is the Schatten norm (sum_i s_i^p)^(1/p) with p = 128, which is at most
  r^(1/128) times the spectral norm for a matrix of rank r (1.033 for 64).

  Args:
    w: matrix, [m, n].
  """
  w = w.T if w.shape[0] < w.shape[1] else w
  gram = dot(w.T, w)
  log = jnp.zeros((), w.dtype)
  # Divide by the trace before each product, to stay in the range of float32.
  for i in range(_SQUARINGS):
    trace = jnp.maximum(jnp.trace(gram), jnp.finfo(w.dtype).tiny)
    log += jnp.log(trace) / 2**i
    gram = gram / trace
    gram = dot(gram, gram)
  log += jnp.log(jnp.trace(gram)) / 2**_SQUARINGS
  return jnp.exp(log / 2)


def soft_cap(w: jax.Array, most: float) -> jax.Array:
  """Returns a matrix of spectral norm at most `most`, in products only.

  With the bound k of `norm_bound`, W - a W W.T W is taken twice, once with a
  and once with -a, where a is the least number for which k becomes `most`. The
  map of singular values is monotone up to k = 1.3 `most`; a greater matrix is
  first multiplied by a number. A matrix with k below `most` stays as it is; if
  all r singular values are equal, it ends at most / r^(1/128).

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
    w = w + sign * a * dot(dot(w, w.T), w)
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

  Raises:
    UserError: when it is initialised for a model without kernels in its layers.
  """
  function = CAPS[kind]

  def capped(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    split = split_axes(path, param)
    is_table = bool(TABLE.fullmatch(name))
    if split is None and not is_table:
      return update
    w = param + update
    if is_table:
      size = jnp.sqrt(jnp.square(w).mean(-1, keepdims=True))
      return w / jnp.maximum(size, 1) - param
    m = math.prod(w.shape[:split])
    matrix = w.reshape(m, -1)
    limit = most * math.sqrt(matrix.shape[1] / m)
    return function(matrix, limit).reshape(w.shape) - param

  def init(params: Any) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if all(split_axes(path, leaf) is None for path, leaf in leaves):
      raise UserError(
        f"config.optimizer.cap={kind} has nothing to cap: the layers of this "
        "model have no kernels, only rotations. Leave it out."
      )
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree_util.tree_map_with_path(capped, updates, params), state

  return optax.GradientTransformation(init, update)
