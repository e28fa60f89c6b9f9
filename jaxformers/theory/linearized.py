"""The linearised network as a polynomial of the Gram matrix of its input.

Source: Levine et al. 2020, https://arxiv.org/abs/2006.12467, equations 3 and 4
(the first W^Q before W^V of the text is W^O).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


class Maps(NamedTuple):
  """Products of the weights of a network, [layers, heads, d, d] each.

  Attributes:
    values: W_O W_V.
    scores: W_K.T W_Q.
  """

  values: jax.Array
  scores: jax.Array


def maps(params: Any, scale: float = 1.0) -> Maps:
  """Returns the products of the weights of a model `linearized`.

  Args:
    params: parameters of the encoder, `layer_0` and so on, without biases.
    scale: option `scale` of the mixer.
  """
  values, scores = [], []
  for k in range(sum(name.startswith("layer_") for name in params)):
    mixer = params[f"layer_{k}"]["mixer"]
    q, key, v = (mixer[name]["kernel"] for name in ("query", "key", "value"))
    # Kernels multiply x from the left: [d, h, e], and [h, e, d] for the output.
    out = mixer["out"]["kernel"]
    values.append(jnp.einsum("hed,che->hdc", out, v, precision=_HIGHEST))
    product = jnp.einsum("dhe,che->hdc", key, q, precision=_HIGHEST)
    scores.append(scale * product)
  return Maps(jnp.stack(values), jnp.stack(scores))


def literal(x: jax.Array, maps: Maps, residual: bool = False) -> jax.Array:
  """Applies equation 3 token by token: x [n, d] -> [n, d].

  y_i = sum_j sum_h (x_j . W_K.T W_Q x_i) W_O W_V x_j, layer after layer.

  Args:
    x: tokens, [n, d].
    maps: weights of the network.
    residual: True if every layer adds its input.
  """
  for values, scores in zip(*maps, strict=True):
    weights = jnp.einsum("jc,hcd,id->hij", x, scores, x, precision=_HIGHEST)
    y = jnp.einsum("hij,hdc,jc->id", weights, values, x, precision=_HIGHEST)
    # Add the input under a residual connection.
    x = x + y if residual else y
  return x


def polynomial(
  gram: jax.Array, maps: Maps, residual: bool = False
) -> jax.Array:
  """Returns P(S) [d, d]: the output of the network is P(S) x.

  S = x.T x is the Gram matrix of the input. P has degree (3^L - 1) / 2 and is
  the product of T_l = sum_h W_O W_V S_l W_K.T W_Q with S_(l+1) = T_l S_l T_l.T;
  under a residual connection T_l + I replaces T_l. Costs L H d^3, whatever the
  number of tokens.

  Args:
    gram: Gram matrix S_1, [d, d].
    maps: weights of the network.
    residual: True if every layer adds its input.
  """
  # Multiply the T_l, and update the Gram matrix after each.
  eye = jnp.eye(len(gram), dtype=gram.dtype)
  total = eye
  for values, scores in zip(*maps, strict=True):
    t = jnp.einsum("hij,jk,hkl->il", values, gram, scores, precision=_HIGHEST)
    t = t + eye if residual else t
    total = jnp.matmul(t, total, precision=_HIGHEST)
    gram = jnp.matmul(
      jnp.matmul(t, gram, precision=_HIGHEST), t.T, precision=_HIGHEST
    )
  return total


def compact(x: jax.Array, maps: Maps, residual: bool = False) -> jax.Array:
  """Applies the network by `polynomial`: x [n, d] -> [n, d], as `literal`."""
  gram = jnp.matmul(x.T, x, precision=_HIGHEST)
  total = polynomial(gram, maps, residual)
  return jnp.matmul(x, total.T, precision=_HIGHEST)
