"""Activation functions by name, with gradients that are fast on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.models.reductions import wide


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
  """Returns GELU(x) = x Phi(x), where Phi is the normal distribution function.

  The forward pass stores only the slope Phi(x) + x Phi'(x). Otherwise XLA on
  CPUs would compute the error function again for every product that reads the
  result. The error of Phi is half a unit in the last place of 1, as in PyTorch.

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
  # d/dx (x Phi(x)) = Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi).
  below = _distribution(precise)
  slope = below + precise * jnp.exp(-jnp.square(precise) / 2) / _SQRT_2_PI
  dtype = x[0].dtype
  return (precise * below).astype(dtype), slope.astype(dtype) * dx[0]


_SQRT_2_PI = math.sqrt(2 * math.pi)


def _distribution(x: jax.Array) -> jax.Array:
  """Returns Phi(x), the probability of a normal number below x."""
  return (1 + jax.lax.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: jax.Array) -> jax.Array:
  """Returns x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, close to GELU.

  The result and its gradient are finite for all finite x: x is clipped to +-16
  before the cube. Beyond +-16 the hyperbolic tangent is 1 or -1 even in
  float64.

  Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415, section
  2.
  """
  near = jnp.clip(x, -16, 16)
  inner = math.sqrt(2 / math.pi) * (near + 0.044715 * near**3)
  return x * (0.5 * (1 + jnp.tanh(inner)))


@jax.custom_jvp
def elu(x: jax.Array) -> jax.Array:
  """Returns x where x is positive and exp(x) - 1 elsewhere, in the type of x.

  The gradient is 1 + min(y, 0). It needs only the output y: the backward pass
  stores no input and computes no exponential.

  The error is half a unit in the last place of 1, which suffices because the
  callers add the result to numbers of order 1. The error of `jax.nn.elu` is one
  unit in the last place of the result, at two to three times the cost on CPUs.
  """
  precise = wide(x)
  low = jnp.exp(jnp.minimum(precise, 0)) - 1
  return jnp.where(precise > 0, precise, low).astype(x.dtype)


@elu.defjvp
def _elu_jvp(
  x: tuple[jax.Array], dx: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  # The slope is 1 for x > 0, and exp(x) = 1 + y elsewhere.
  y = elu(*x)
  return y, dx[0] * (1 + jnp.minimum(y, 0))


def maxmin(x: jax.Array) -> jax.Array:
  """Returns the maxima and then the minima of pairs of channels, [..., d].

  Channel i is paired with channel i + d / 2. The map is 1-Lipschitz and keeps
  the norm of every gradient, which ELU lessens, except where two channels are
  equal; it is not injective.

  Source: Anil et al. 2019, https://arxiv.org/abs/1811.05381 (GroupSort of
  groups of two).

  Args:
    x: channels, [..., d], d even.

  Raises:
    UserError: for an odd d.
  """
  if x.shape[-1] % 2:
    raise UserError(
      f"activation='maxmin' sorts pairs of channels, but {x.shape[-1]} is odd: "
      "choose an even d_model, or activation=elu."
    )
  left, right = jnp.split(x, 2, -1)
  return jnp.concatenate(
    [jnp.maximum(left, right), jnp.minimum(left, right)], -1
  )


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "gelu": gelu,
  "gelu_tanh": gelu_tanh,
  "relu": nn.relu,
  "silu": nn.silu,
  "tanh": nn.tanh,
}
# Activations of TransJect's feed-forward, which are 1-Lipschitz.
NONEXPANSIVE: dict[str, Callable[[jax.Array], jax.Array]] = {
  "elu": elu,
  "maxmin": maxmin,
}
# Lipschitz constants of the activations (their greatest slopes), rounded up.
SLOPES = {
  "gelu": 1.13,
  "gelu_tanh": 1.13,
  "relu": 1.0,
  "silu": 1.1,
  "tanh": 1.0,
}
