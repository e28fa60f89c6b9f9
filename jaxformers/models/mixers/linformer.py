"""Linformer: keys and values projected to a few along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention
from jaxformers.models.mixers.softmax import dot
from jaxformers.models.variants import MODELS, Variant

MODELS.register("linformer")(Variant("linformer"))


@attention("linformer")
def linformer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  param: Callable[..., Any],
  draw: Callable[..., jax.Array],
  max_len: int,
  rank: int = 128,
  share_heads: bool = False,
  share_key_value: bool = False,
  train_projection: bool = True,
) -> jax.Array:
  """softmax(q (E k).T / sqrt(e)) F v with E and F [rank, max_len] of each head.

  With `share_heads` all heads have one E and one F, with `share_key_value`
  E = F. Entries start normal with variance 1 / rank. Without `train_projection`
  they are drawn and stay.

  Source: Wang et al. 2020, https://arxiv.org/abs/2006.04768, equation 7 and
  section 4. Skyformer's code has E = F in each head, of deviation 0.02, which
  on a GPU is neither trained nor saved (`share_key_value`, and no
  `train_projection`, but for the deviation); LRA's shares one and ignores the
  padding, which here is 0 before it is projected. No causal form: E mixes past
  and future.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  if not 1 <= rank <= max_len:
    raise UserError(
      f"rank={rank} is not in 1 to max_len={max_len}: choose a smaller rank."
    )
  n, shape = mask.shape[1], (rank, max_len)
  if not share_heads:
    shape = (q.shape[1], *shape)
  init = nn.initializers.normal(rank**-0.5)

  def projection(name: str) -> jax.Array:
    if train_projection:
      return param(name, init, shape)
    return draw(name, lambda key: init(key, shape))

  by_k = projection("project_keys")
  by_v = by_k if share_key_value else projection("project_values")
  axes = "mn" if share_heads else "hmn"
  k, v = (
    jnp.einsum(
      f"{axes},bhne->bhme",
      by[..., :n].astype(a.dtype),
      jnp.where(mask[:, None, :, None], a, 0),
    )
    for by, a in ((by_k, k), (by_v, v))
  )
  weights = jax.nn.softmax(dot(q, k) / q.shape[-1] ** 0.5, axis=-1)
  return jnp.matmul(dropout(weights).astype(v.dtype), v)
