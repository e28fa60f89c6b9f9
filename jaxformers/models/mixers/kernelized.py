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
  """exp(-|x - y|^2 / 2): [..., n, e], [..., m, e] -> float32 [..., n, m]."""
  x, y = wide(x), wide(y)
  xx, yy = (jnp.square(a).sum(-1) / 2 for a in (x, y))
  exponent = dot(x, y, HIGHEST) - xx[..., :, None] - yy[..., None, :]
  # Rounding leaves a positive rest where x and y are large and alike.
  return jnp.exp(jnp.where(exponent > 0, 0, exponent))


@attention("kernelized")
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
  """exp(-|q - k|^2 / 2) v with q and k scaled by e^-1/4, rows not normalised.

  Source: Chen et al. 2021 (Skyformer), https://arxiv.org/abs/2111.00035,
  equation 4. With `normalize` rows sum to one: the Gaussian ("RBF") kernel
  attention that NeuTRENO's table 8 is about, after Tsai et al. 2019,
  https://arxiv.org/abs/1908.11775.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  scale = q.shape[-1] ** -0.25
  weights = jnp.where(
    seen_keys(mask, causal), gaussian(q * scale, k * scale), 0
  )
  if normalize:
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
  weights = dropout(weights).astype(v.dtype)
  return jnp.einsum("bhnm,bhme->bhne", weights, v)
