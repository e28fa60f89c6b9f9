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
  """What a network of L layers and H heads is made of, [l, h, d, d] each.

  Attributes:
    into: W_O W_V.
    of: W_K.T W_Q.
  """

  into: jax.Array
  of: jax.Array


def maps(params: Any, scale: float = 1.0) -> Maps:
  """Those of the model `linearized`, from its parameters.

  Args:
    params: of the encoder, `layer_0` and so on, without biases.
    scale: of the mixer.
  """
  into, of = [], []
  for k in range(sum(name.startswith("layer_") for name in params)):
    mixer = params[f"layer_{k}"]["mixer"]
    q, key, v = (mixer[name]["kernel"] for name in ("query", "key", "value"))
    # Kernels take x from the left: [d, h, e], and [h, e, d] back.
    out = mixer["out"]["kernel"]
    into.append(jnp.einsum("hed,che->hdc", out, v, precision=_HIGHEST))
    of.append(scale * jnp.einsum("dhe,che->hdc", key, q, precision=_HIGHEST))
  return Maps(jnp.stack(into), jnp.stack(of))


def literal(x: jax.Array, maps: Maps, residual: bool = False) -> jax.Array:
  """Equation 3 as it stands, token by token: x [n, d] -> [n, d].

  y_i = sum_j sum_h (x_j . W_K.T W_Q x_i) W_O W_V x_j, layer after layer.
  """
  for into, of in zip(*maps, strict=True):
    scores = jnp.einsum("jc,hcd,id->hij", x, of, x, precision=_HIGHEST)
    y = jnp.einsum("hij,hdc,jc->id", scores, into, x, precision=_HIGHEST)
    x = x + y if residual else y
  return x


def polynomial(
  gram: jax.Array, maps: Maps, residual: bool = False
) -> jax.Array:
  """P(S): the output is P(S) x, S the Gram matrix x.T x -> [d, d].

  Of degree (3^L - 1) / 2 in S. T_l = sum_h W_O W_V S_l W_K.T W_Q, and S_(l+1) =
  T_l S_l T_l.T; under a residual connection T_l + I stands for T_l. P is the
  product of the T_l. Costs L H d^3, whatever the number of tokens.

  Args:
    gram: S_1, [d, d].
    maps: of the network.
    residual: whether every layer adds its input.
  """
  eye = jnp.eye(len(gram), dtype=gram.dtype)
  total = eye
  for into, of in zip(*maps, strict=True):
    t = jnp.einsum("hij,jk,hkl->il", into, gram, of, precision=_HIGHEST)
    t = t + eye if residual else t
    total = jnp.matmul(t, total, precision=_HIGHEST)
    gram = jnp.matmul(
      jnp.matmul(t, gram, precision=_HIGHEST), t.T, precision=_HIGHEST
    )
  return total


def compact(x: jax.Array, maps: Maps, residual: bool = False) -> jax.Array:
  """The network by `polynomial`: x [n, d] -> [n, d]; equal to `literal`."""
  gram = jnp.matmul(x.T, x, precision=_HIGHEST)
  total = polynomial(gram, maps, residual)
  return jnp.matmul(x, total.T, precision=_HIGHEST)
