"""Attention that is nonexpansive for the greatest distance of two tokens.

The distance of two sequences X and Y of one mask is max_i |x_i - y_i| here. A
head divides its output by its Lipschitz constant for this distance, which does
not depend on the number of tokens (`ball`), or only as its logarithm (`l2`).
The maps to heads and back are rotations, so the whole mixer is 1-Lipschitz, and
the block `contractive` makes an injective encoder of it. docs/theory.md,
section 17, has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.attention import Cache, attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.flash import Form, attend
from jaxformers.models.mixers.kernelized import exponents
from jaxformers.models.mixers.scores import HIGHEST
from jaxformers.models.mixers.softmax import attend_cached
from jaxformers.models.reductions import wide
from jaxformers.models.variants import ALWAYS, MODELS, Variant

# Options of `Attention` under which the constants hold.
BOUNDED = {
  "orthogonal": True,
  "orthogonal_output": True,
  "fidelity": 0.0,
  "fidelity_schedule": (),
  "learn_fidelity": False,
  "value_residual": 0.0,
  "learn_value_residual": False,
  "share_values": False,
  "differential": False,
  "gate": "none",
  "feat_scale": False,
}

MODELS.register("injective_transformer")(
  Variant(
    "ball",
    "contractive",
    fixed=BOUNDED,
    bounded=ALWAYS,
    source="new here",
  )
)
MODELS.register("l2_transformer")(
  Variant(
    "l2",
    "contractive",
    fixed=BOUNDED,
    bounded=ALWAYS,
    source="Kim et al. 2021",
  )
)

Parameters = Callable[..., jax.Array]


def into_ball(x: jax.Array, radius: jax.Array) -> jax.Array:
  """Returns vectors [..., e] projected onto a ball, and divided by its radius.

  The projection x min(1, radius / |x|) is 1-Lipschitz.

  Args:
    x: vectors.
    radius: radius, of a shape that broadcasts to [..., 1].
  """
  x = wide(x)
  squares = jnp.square(x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squares, jnp.square(radius)))


def _ball_constant(sharpness: Any) -> Any:
  """Returns the Lipschitz constant of a head of `ball` before its division."""
  return 1 + 2 * sharpness


def _ball_heads(
  q: jax.Array, k: jax.Array, v: jax.Array, param: Parameters
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns queries, keys and values of `ball`, whose scores are q k.T."""
  dtype = v.dtype
  h, e = q.shape[1], q.shape[-1]
  start = jax.nn.initializers.zeros
  # A head has a sharpness s, and a radius that starts at RMS norm 1.
  sharpness, radius = (
    jnp.exp(param(name, start, (h,)))[None, :, None, None]
    for name in ("log_sharpness", "log_radius")
  )
  radius = math.sqrt(e) * radius
  q, k, v = (into_ball(x, radius) for x in (q, k, v))
  # Divide by the constant of a head, and for h heads by sqrt(h).
  share = 1 / (math.sqrt(h) * _ball_constant(sharpness))
  q, v = q * sharpness, v * radius * share
  return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def _ball_constants(
  norms: Mapping[str, np.ndarray], params: Mapping[str, Any]
) -> np.ndarray:
  """Returns the Lipschitz constants of the heads of `ball`, float64 [h]."""
  s = np.exp(np.asarray(params["log_sharpness"], np.float64))
  # `symmetric` uses the keys as queries.
  both = norms.get("query", norms["key"]) + norms["key"]
  constants = (norms["value"] + s * both) / _ball_constant(s)
  return constants / math.sqrt(len(s))


def _ball_step(
  q: jax.Array, k: jax.Array, v: jax.Array, *, cache: Cache
) -> jax.Array:
  """Computes causal `ball` of new tokens to these and to cached tokens."""
  heads = _ball_heads(q, k, v, cache.module.param)
  return attend_cached(*heads, cache=cache)


@attention(
  "ball",
  step=_ball_step,
  constants=_ball_constants,
  orthogonal=True,
  orthogonal_output=True,
)
def ball(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  param: Parameters,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention of vectors in a ball, divided by its Lipschitz constant.

  Queries, keys and values of a head are projected onto a ball, whose radius R
  is learned. Scores are s q.k / R^2, with a learned sharpness s. The greatest
  distance of two output tokens is then at most 1 + 2 s times the greatest
  distance of two inputs, for any number of tokens, causal or not. The output is
  divided by this constant, and by the square root of the number of heads.

  Source: new here. Castin et al. 2024, https://arxiv.org/abs/2312.14820, bound
  softmax attention on a ball in the Frobenius norm.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  heads = _ball_heads(q, k, v, param)
  return attend(*heads, mask, Dropout(), Form(causal))


def spread_bound(n: int) -> float:
  """Returns the greatest value of sum_j p_j t_j for weights p_j ~ exp(-t_j).

  t are n numbers that are at least 0, one of them 0. The value is the t with
  t exp(t + 1) = n - 1, which grows as the logarithm of n.

  Source: Kim et al. 2021, https://arxiv.org/abs/2006.04710, theorem 3.2.
  """
  from scipy import special  # The import takes a quarter of a second.

  return float(special.lambertw((n - 1) / math.e).real)


def _l2_heads(
  q: jax.Array, param: Parameters, max_len: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns queries, keys and values of `l2`, whose scores are q k.T."""
  h, e = q.shape[1], q.shape[-1]
  start = jax.nn.initializers.constant(-math.log(e) / 2)
  sharpness = jnp.exp(param("log_sharpness", start, (h,)))[None, :, None, None]
  # The product of the exponents is -s |q_i - q_j|^2.
  x = wide(q) * jnp.sqrt(2 * sharpness)
  share = 1 / (math.sqrt(h) * (1 + 4 * spread_bound(max_len)))
  return *exponents(x, x), wide(q) * share


def _l2_constants(
  norms: Mapping[str, np.ndarray], params: Mapping[str, Any]
) -> np.ndarray:
  """Returns the Lipschitz constants of the heads of `l2`, float64 [h]."""
  del params
  return norms["query"] / math.sqrt(len(norms["query"]))


def _l2_step(q: jax.Array, *, cache: Cache) -> jax.Array:
  """Computes causal `l2` of new tokens to these and to cached tokens."""
  module = cache.module
  heads = _l2_heads(q, module.param, module.max_len)
  y = attend_cached(*heads, cache=cache, precision=HIGHEST)
  return y.astype(q.dtype)


@attention(
  "l2",
  step=_l2_step,
  constants=_l2_constants,
  orthogonal=True,
  orthogonal_output=True,
)
def l2(
  q: jax.Array,
  *,
  mask: jax.Array,
  param: Parameters,
  max_len: int,
  causal: bool = False,
) -> jax.Array:
  """L2 attention softmax(-s |q_i - q_j|^2) q, divided by its constant.

  Queries, keys and values are the same vectors, and each token sees itself;
  without either there is no Lipschitz constant. The greatest distance of two
  output tokens is at most 1 + 4 t times the greatest distance of two inputs,
  where t exp(t + 1) = n - 1 for n tokens (`spread_bound`). The output is
  divided by the constant for max_len tokens, and by the square root of the
  number of heads.

  Source: Kim et al. 2021, https://arxiv.org/abs/2006.04710, theorem 3.2 and
  section 4.1. Differs from it: the map of the values, a matrix [e, e] after
  q, is part of the output projection, which is a rotation; s is learned.

  Shapes: q [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  heads = _l2_heads(q, param, max_len)
  y = attend(*heads, mask, Dropout(), Form(causal, precision=HIGHEST))
  return y.astype(q.dtype)
