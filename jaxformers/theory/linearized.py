"""Linearised self-attention as a polynomial of the Gram matrix of its input.

Source: Levine et al. 2020, https://arxiv.org/abs/2006.12467, equations 3 and 4.
In the paper's text, the first W^Q before W^V is a misprint of W^O.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.theory.rank import Weights

_HIGHEST = jax.lax.Precision.HIGHEST
_einsum = functools.partial(jnp.einsum, precision=_HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=_HIGHEST)


def maps(params: Any, scale: float = 1.0) -> Weights:
  """Returns the products W_O W_V and W_K.T W_Q of a model `linearized`.

  Args:
    params: parameters of the encoder, `layer_0` and so on, without biases.
    scale: option `scale` of the mixer.
  """
  values, scores = [], []
  for k in range(sum(name.startswith("layer_") for name in params)):
    mixer = params[f"layer_{k}"]["mixer"]
    q, key, v = (mixer[name]["kernel"] for name in ("query", "key", "value"))
    # Kernels act as x @ kernel: [d, h, e], and [h, e, d] for the output.
    out = mixer["out"]["kernel"]
    values.append(_einsum("hed,che->hdc", out, v))
    scores.append(scale * _einsum("dhe,che->hdc", key, q))
  return Weights(jnp.stack(values), jnp.stack(scores))


def literal(x: jax.Array, maps: Weights, residual: bool = False) -> jax.Array:
  """Applies equation 3 token by token, x [n, d] -> [n, d].

  Each layer computes y_i = sum_j sum_h (x_j . W_K.T W_Q x_i) W_O W_V x_j.

  Args:
    x: tokens, [n, d].
    maps: weights of the network.
    residual: True if every layer adds its input.
  """
  for values, scores in zip(*maps, strict=True):
    # pairs[h, i, j] = x_j . W_K.T W_Q x_i.
    pairs = _einsum("jc,hcd,id->hij", x, scores, x)
    y = _einsum("hij,hdc,jc->id", pairs, values, x)
    # Add the input under a residual connection.
    x = x + y if residual else y
  return x


def polynomial(
  gram: jax.Array, maps: Weights, residual: bool = False
) -> jax.Array:
  """Returns the matrix P(S) [d, d] with which the network outputs P(S) x.

  S = x.T x is the Gram matrix of the input. P is a polynomial of degree
  (3^L - 1) / 2: the product of T_l = sum_h W_O W_V S_l W_K.T W_Q over the
  layers, with S_1 = S and S_(l+1) = T_l S_l T_l.T. With a residual connection,
  T_l + I replaces T_l. The cost is O(L H d^3), for any number of tokens.

  Args:
    gram: Gram matrix S_1, [d, d].
    maps: weights of the network.
    residual: True if every layer adds its input.
  """
  # Multiply the T_l, and update the Gram matrix after each.
  eye = jnp.eye(len(gram), dtype=gram.dtype)
  total = eye
  for values, scores in zip(*maps, strict=True):
    t = _einsum("hij,jk,hkl->il", values, gram, scores)
    t = t + eye if residual else t
    total = _matmul(t, total)
    gram = _matmul(_matmul(t, gram), t.T)
  return total


def compact(x: jax.Array, maps: Weights, residual: bool = False) -> jax.Array:
  """Applies the network as P(S) x, x [n, d] -> [n, d]; equals `literal`."""
  gram = _matmul(x.T, x)
  total = polynomial(gram, maps, residual)
  return _matmul(x, total.T)
