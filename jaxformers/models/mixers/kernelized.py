"""Kernelized attention: a Gaussian kernel in place of the softmax."""

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
    x: [..., n, e].
    y: [..., m, e].
  """
  # Rounding makes the exponent positive where x and y are large and close.
  return exp_below_one(dot(*exponents(x, y), HIGHEST))


def exponents(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns x and y with two more channels, so that x y.T is -|x - y|^2 / 2.

  In at least float32. As channels, the squares need no gradient of their own.
  """
  x, y = wide(x), wide(y)
  xx, yy = (-jnp.square(a).sum(-1, keepdims=True) / 2 for a in (x, y))
  one = jnp.ones_like
  return (
    jnp.concatenate([x, xx, one(xx)], -1),
    jnp.concatenate([y, one(yy), yy], -1),
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
  weights do not sum to one. With `normalize` they do: this is the Gaussian
  ("RBF") kernel attention of NeuTRENO's table 8, after Tsai et al. 2019,
  https://arxiv.org/abs/1908.11775.

  Source: Chen et al. 2021, https://arxiv.org/abs/2111.00035 (Skyformer),
  equation 4.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """

  scale = q.shape[-1] ** -0.25
  form = Form(causal, normalize, precision=HIGHEST)
  return attend(*exponents(q * scale, k * scale), v, mask, dropout, form)
