"""Kernelized attention: a Gaussian kernel instead of the softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.flash import Form, attend
from jaxformers.models.mixers.scores import HIGHEST, dot, exp_below_one
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("kernelized")(Variant("kernelized"))


def gaussian(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns exp(-|x - y|^2 / 2), float32 [..., n, m].

  Args:
    x: vectors, [..., n, e].
    y: vectors, [..., m, e].
  """
  # Rounding can make the exponent positive where x and y are large and close.
  return exp_below_one(dot(*exponents(x, y), HIGHEST))


def exponents(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns x and y with two more channels, so that x y.T is -|x - y|^2 / 2.

  The results are in at least float32. The squares are channels, so their
  gradients need no separate sums over the weights.
  """
  x, y = wide(x), wide(y)
  # x . y - |x|^2 / 2 - |y|^2 / 2 = -|x - y|^2 / 2
  xx, yy = (-jnp.square(a).sum(-1, keepdims=True) / 2 for a in (x, y))
  ones = jnp.ones_like
  return (
    jnp.concatenate([x, xx, ones(xx)], -1),
    jnp.concatenate([y, ones(yy), yy], -1),
  )


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
  """Kernel attention exp(-|q - k|^2 / 2) v.

  q and k are first divided by the fourth root of their width e. The rows of
  weights do not sum to one, except with `normalize`, which gives the Gaussian
  ("RBF") kernel attention of NeuTRENO's table 8, after Tsai et al. 2019,
  https://arxiv.org/abs/1908.11775.

  Source: Chen et al. 2021, https://arxiv.org/abs/2111.00035 (Skyformer),
  equation 4.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Divide by e^(1/4), and compute the exponents as products of two vectors.
  scale = q.shape[-1] ** -0.25
  form = Form(causal, normalize, precision=HIGHEST)
  return attend(*exponents(q * scale, k * scale), v, mask, dropout, form)
