"""Softmax attention: the Transformer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.models.attention import attention


@attention("softmax")
def softmax(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  carry: Any,
  dropout: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, Any]:
  """softmax(q k.T / sqrt(e)) v over the tokens, the weights in float32.

  Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens;
  carry is handed on as it came.
  """
  scores = jnp.einsum(
    "bhne,bhme->bhnm", q, k, preferred_element_type=jnp.float32
  )
  scores = scores / jnp.sqrt(jnp.float32(q.shape[-1]))
  lowest = jnp.finfo(scores.dtype).min
  scores = jnp.where(mask[:, None, None, :], scores, lowest)
  weights = dropout(jax.nn.softmax(scores, axis=-1)).astype(v.dtype)
  return jnp.einsum("bhnm,bhme->bhne", weights, v), carry
