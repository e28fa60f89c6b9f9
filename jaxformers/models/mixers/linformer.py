"""Linformer: keys and values projected along the sequence to `rank`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Length, Size
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import sum_values
from jaxformers.models.mixers.scores import dot
from jaxformers.models.variants import MODELS, Variant

MODELS.register("linformer")(Variant("linformer"))


@attention("linformer")
def linformer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  param: Callable[..., Any],
  draw: Callable[..., jax.Array],
  max_len: Length,
  rank: Size = 128,
  share_heads: bool = False,
  share_key_value: bool = False,
  train_projection: bool = True,
) -> jax.Array:
  """Softmax attention to projected keys: softmax(q (E k).T / sqrt(e)) F v.

  Each head has its own E and F, [rank, max_len]. `share_heads` gives all heads
  one E and one F, and `share_key_value` sets E = F. Entries are drawn from a
  normal distribution of variance 1 / rank, and trained with `train_projection`.

  Source: Wang et al. 2020, https://arxiv.org/abs/2006.04768, equation 7 and
  section 4. Equals softmax attention with rank n and E = F = I. Differs from
  Skyformer's code, where E = F in each head, with standard deviation 0.02, and
  on a GPU E is neither trained nor saved; `share_key_value` without
  `train_projection` gives the same, except for the deviation. Differs from
  LRA's code, which shares one E and also projects the padding; here padding is
  0. No causal form: E mixes past and future.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  if not 1 <= rank <= max_len:
    raise UserError(
      f"rank={rank} is not in 1 to max_len={max_len}: choose a smaller rank."
    )
  # Create E and F for max_len positions; shorter sequences use a part of them.
  n = mask.shape[1]
  shape: tuple[int, ...] = (rank, max_len)
  if not share_heads:
    shape = (q.shape[1], *shape)
  init = nn.initializers.normal(rank**-0.5)

  def projection(name: str) -> jax.Array:
    if train_projection:
      return param(name, init, shape)
    return draw(name, lambda key: init(key, shape))

  # Set padding to 0, then project keys and values from n tokens to `rank`.
  to_keys = projection("project_keys")
  to_values = to_keys if share_key_value else projection("project_values")
  axes = "mn" if share_heads else "hmn"
  k, v = (
    jnp.einsum(
      f"{axes},bhne->bhme",
      matrix[..., :n].astype(a.dtype),
      jnp.where(mask[:, None, :, None], a, 0),
    )
    for matrix, a in ((to_keys, k), (to_values, v))
  )
  # Attend to the projected keys, none of which is padding.
  return sum_values([dot(q, k) * q.shape[-1] ** -0.5], [v], dropout)
