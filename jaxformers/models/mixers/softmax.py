"""Softmax attention of the Transformer, and helpers of other softmax mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.models.attention import attention
from jaxformers.models.variants import MODELS, Variant

MODELS.register("transformer")(Variant("softmax"))
MODELS.register("transformer_rezero")(
  Variant("softmax", "rezero", source="Bachlechner et al. 2021")
)
MODELS.register("transformer_orthogonal")(
  Variant("softmax", fixed={"orthogonal": True}, source="TransJect, table 1")
)
MODELS.register("neutreno")(
  Variant("softmax", defaults={"fidelity": 0.6}, source="Nguyen et al. 2023")
)
MODELS.register("symmetric_transformer")(
  Variant(
    "softmax",
    fixed={"symmetric": True},
    source="Nguyen et al. 2023, equation 13",
  )
)

# Accelerators compute float32 products at a lower precision by default. This
# one is for products whose rounding errors are amplified later.
HIGHEST = jax.lax.Precision.HIGHEST


def dot(q: jax.Array, k: jax.Array, precision: Any = None) -> jax.Array:
  """Returns q k.T in at least float32, [..., n, m].

  Args:
    q: [..., n, e].
    k: [..., m, e].
    precision: precision of the product; None for the default.
  """
  return jnp.einsum(
    "...ne,...me->...nm",
    q,
    k,
    precision=precision,
    preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
  )


def weigh(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns the softmax of scores [..., n, m] over the keys that are seen.

  Args:
    scores: [..., n, m], float32.
    seen: True where a query sees a key; has the rank of the scores, and axes
      of 1 where it is shared. A query that sees nothing gets uniform weights.
  """
  # A finite number: the softmax of a row of -inf would be NaN.
  lowest = jnp.finfo(scores.dtype).min
  return jax.nn.softmax(jnp.where(seen, scores, lowest), axis=-1)


def earlier(n: int, m: int | None = None) -> jax.Array:
  """Returns the causal mask: True where key j <= query i, [n, m or n]."""
  return jnp.arange(n)[:, None] >= jnp.arange(m or n)[None]


def seen_keys(mask: jax.Array, causal: bool) -> jax.Array:
  """Returns the mask of visible keys: [b, 1, 1, n]; causal [b, 1, n, n]."""
  seen = mask[:, None, None]
  return seen & earlier(mask.shape[1])[None, None] if causal else seen


@attention("softmax", growth="n^2")
def softmax(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  causal: bool = False,
) -> jax.Array:
  """Softmax attention: softmax(q k.T / sqrt(e)) v, with float32 weights.

  Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Normalise in float32, then multiply in the compute type.
  weights = weigh(dot(q, k) / q.shape[-1] ** 0.5, seen_keys(mask, causal))
  weights = dropout(weights).astype(v.dtype)
  return jnp.einsum("bhnm,bhme->bhne", weights, v)
