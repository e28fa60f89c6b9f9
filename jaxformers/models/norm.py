"""Norms of tokens."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.attention import wide
from jaxformers.models.parallel import column_sums, row_sums
from jaxformers.registry import Registry

NORMS: Registry = Registry("norm")
# Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.
NORMS.register("rms")(nn.RMSNorm)


@NORMS.register("layer")
class LayerNorm(nn.Module):
  """Normalises tokens to mean 0 and variance 1, then scales and shifts them.

  As `nn.LayerNorm`, in at least float32, but the backward pass computes nothing
  again: it keeps the normalised tokens. So JAX cannot differentiate it forwards
  (`jax.jvp`).

  Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450, equation 4.

  Attributes:
    epsilon: constant that is added to the variance.
  """

  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = wide(jnp.asarray(x))
    shape = x.shape[-1:]
    scale = self.param("scale", nn.initializers.ones, shape)
    bias = self.param("bias", nn.initializers.zeros, shape)
    scale, bias = scale.astype(x.dtype), bias.astype(x.dtype)
    return _normalize(self.epsilon, x, scale, bias)


@NORMS.register("scale")
class ScaleNorm(nn.Module):
  """Divides tokens by the root of their mean square, times one parameter.

  Source: Nguyen and Salazar 2019, https://arxiv.org/abs/1910.05895, section
  2.2, by the mean in place of the sum, as in Mega's code.

  Attributes:
    epsilon: constant that is added to the mean square.
  """

  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = wide(jnp.asarray(x))
    scale = self.param("scale", nn.initializers.ones, ()).astype(x.dtype)
    square = row_sums(jnp.square(x)) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(square + self.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(
  epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
  return _forward(epsilon, x, scale, bias)[0]


def _forward(
  epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, Any]:
  d = x.shape[-1]
  centred = x - row_sums(x) / d
  inverse = jax.lax.rsqrt(row_sums(jnp.square(centred)) / d + epsilon)
  unit = centred * inverse
  return _along(scale, x) * unit + _along(bias, x), (unit, inverse, scale)


def _backward(_: float, kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
  unit, inverse, scale = kept
  # The norm takes out the mean of a token and its part along itself.
  slope = g * _along(scale, g)
  taken = row_sums(slope) + unit * row_sums(slope * unit)
  dx = (slope - taken / g.shape[-1]) * inverse
  return dx, column_sums(g * unit), column_sums(g)


_normalize.defvjp(_forward, _backward)


def _along(vector: jax.Array, x: jax.Array) -> jax.Array:
  """Returns a vector [d] as [1, ..., 1, d], to combine with x [..., d]."""
  return jnp.expand_dims(vector, range(x.ndim - 1))
