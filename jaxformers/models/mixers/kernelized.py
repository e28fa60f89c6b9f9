"""Kernelized attention: a Gaussian kernel in place of the softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxformers.models.attention import Dropout, attention, wide
from jaxformers.models.mixers.flash import attend
from jaxformers.models.mixers.scores import HIGHEST, dot
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


@attention("kernelized", growth="n")
def kernelized(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
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

  def weigh_keys(q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    weights = jnp.where(seen, gaussian(q, k), 0)
    if not normalize:
      return weights
    # A query without visible keys has the sum 0 and keeps weights of 0.
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)

  scale = q.shape[-1] ** -0.25
  return attend(
    weigh_keys,
    q * scale,
    k * scale,
    v,
    mask=mask,
    dropout=dropout,
    causal=causal,
  )
