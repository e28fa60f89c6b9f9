"""Kernelized attention: a Gaussian kernel in place of the softmax."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.models.attention import attention, wide
from jaxformers.models.mixers.softmax import HIGHEST, dot, seen_keys
from jaxformers.models.variants import MODELS, Variant

MODELS.register("kernelized")(Variant("kernelized"))


def gaussian(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns exp(-|x - y|^2 / 2), float32 [..., n, m].

  Args:
    x: [..., n, e].
    y: [..., m, e].
  """
  x, y = wide(x), wide(y)
  xx, yy = (jnp.square(a).sum(-1) / 2 for a in (x, y))
  exponent = dot(x, y, HIGHEST) - xx[..., :, None] - yy[..., None, :]
  # Rounding makes the exponent positive where x and y are large and close.
  return jnp.exp(jnp.where(exponent > 0, 0, exponent))


@attention("kernelized", growth="n^2")
def kernelized(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  causal: bool = False,
  normalize: bool = False,
) -> jax.Array:
  """Kernel attention exp(-|q - k|^2 / 2) v, with q and k scaled by e^-1/4.

  The rows of weights do not sum to one. With `normalize` they do: this is the
  Gaussian ("RBF") kernel attention of NeuTRENO's table 8, after Tsai et al.
  2019, https://arxiv.org/abs/1908.11775.

  Source: Chen et al. 2021, https://arxiv.org/abs/2111.00035 (Skyformer),
  equation 4.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Weigh the visible keys by the kernel.
  scale = q.shape[-1] ** -0.25
  weights = jnp.where(
    seen_keys(mask, causal), gaussian(q * scale, k * scale), 0
  )
  # A query without visible keys has the sum 0 and keeps weights of 0.
  if normalize:
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
  weights = dropout(weights).astype(v.dtype)
  return jnp.einsum("bhnm,bhme->bhne", weights, v)
