"""Softmax attention: the Transformer's, and what others share of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.models.attention import attention
from jaxformers.models.variants import MODELS, Variant

MODELS.register("transformer")(Variant("softmax"))
MODELS.register("transformer_rezero")(Variant("softmax", "rezero"))
MODELS.register("transformer_orthogonal")(
  Variant("softmax", fixed={"orthogonal": True})
)
MODELS.register("neutreno")(Variant("softmax", defaults={"fidelity": 0.6}))
MODELS.register("symmetric_transformer")(
  Variant("softmax", fixed={"symmetric": True})
)

# For what is amplified later: accelerators take float32 products at less.
HIGHEST = jax.lax.Precision.HIGHEST


def dot(q: jax.Array, k: jax.Array, precision: Any = None) -> jax.Array:
  """q k.T in at least float32: [..., n, e], [..., m, e] -> [..., n, m]."""
  return jnp.einsum(
    "...ne,...me->...nm",
    q,
    k,
    precision=precision,
    preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
  )


def weigh(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """The softmax of scores [..., n, m] over the m that are seen, float32.

  Uniform where nothing is seen. `seen` has the rank of the scores, with 1
  where an axis is shared.
  """
  lowest = jnp.finfo(scores.dtype).min
  return jax.nn.softmax(jnp.where(seen, scores, lowest), axis=-1)


def earlier(n: int, m: int | None = None) -> jax.Array:
  """Whether key j is not after query i: bool [n, m], with m = n by default."""
  return jnp.arange(n)[:, None] >= jnp.arange(m or n)[None]


def seen_keys(mask: jax.Array, causal: bool) -> jax.Array:
  """Which keys a query may see: [b, 1, 1, n], or [b, 1, n, n] if causal."""
  seen = mask[:, None, None]
  return seen & earlier(mask.shape[1])[None, None] if causal else seen


@attention("softmax")
def softmax(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  causal: bool = False,
) -> jax.Array:
  """softmax(q k.T / sqrt(e)) v over the tokens, the weights in float32.

  Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  weights = weigh(dot(q, k) / q.shape[-1] ** 0.5, seen_keys(mask, causal))
  weights = dropout(weights).astype(v.dtype)
  return jnp.einsum("bhnm,bhme->bhne", weights, v)
