"""Activation functions by name, with gradients that CPUs compute fast."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.reductions import wide


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
  """Returns x Phi(x), with the normal distribution function Phi.

  The forward pass keeps the slope, Phi(x) + x Phi'(x), and no other array. XLA
  on CPUs would compute the error function again for every product that reads
  the result. As in PyTorch, Phi is right to half a unit in the last place of 1.

  Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415, the
  exact form.
  """
  precise = wide(x)
  return (precise * _distribution(precise)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(
  x: tuple[jax.Array], dx: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  precise = wide(x[0])
  below = _distribution(precise)
  slope = below + precise * jnp.exp(-jnp.square(precise) / 2) / _SQRT_2_PI
  dtype = x[0].dtype
  return (precise * below).astype(dtype), slope.astype(dtype) * dx[0]


_SQRT_2_PI = math.sqrt(2 * math.pi)


def _distribution(x: jax.Array) -> jax.Array:
  """Returns Phi(x), the probability of a normal number below x."""
  return (1 + jax.lax.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: jax.Array) -> jax.Array:
  """Returns x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, near to GELU.

  Finite for all finite x, and so is the gradient: x is cut to +-16 before its
  cube, and beyond that the hyperbolic tangent is 1 or -1 in float64, too.

  Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415, section
  2.
  """
  near = jnp.clip(x, -16, 16)
  inner = math.sqrt(2 / math.pi) * (near + 0.044715 * near**3)
  return x * (0.5 * (1 + jnp.tanh(inner)))


@jax.custom_jvp
def elu(x: jax.Array) -> jax.Array:
  """Returns x where it is positive and exp(x) - 1 elsewhere, in the type of x.

  The gradient, 1 + min(y, 0), needs the output y alone: the backward pass keeps
  no input and computes no exponential.

  The error is half a unit in the last place of 1. `jax.nn.elu` is right to one
  unit of the result, at two to three times the cost on CPUs; the callers add
  the result to numbers of order 1.
  """
  precise = wide(x)
  low = jnp.exp(jnp.minimum(precise, 0)) - 1
  return jnp.where(precise > 0, precise, low).astype(x.dtype)


@elu.defjvp
def _elu_jvp(
  x: tuple[jax.Array], dx: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  y = elu(*x)
  return y, dx[0] * (1 + jnp.minimum(y, 0))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "gelu": gelu,
  "gelu_tanh": gelu_tanh,
  "relu": nn.relu,
  "silu": nn.silu,
  "tanh": nn.tanh,
}
# Their greatest slopes, rounded up.
SLOPES = {
  "gelu": 1.13,
  "gelu_tanh": 1.13,
  "relu": 1.0,
  "silu": 1.1,
  "tanh": 1.0,
}
