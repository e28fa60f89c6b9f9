"""Synthesizer: attention logits without a product of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention, wide
from jaxformers.models.mixers.softmax import dot, seen_keys, weigh
from jaxformers.models.variants import MODELS, Variant
from jaxformers.registry import choose

MODELS.register("synthesizer")(Variant("synthesizer"))

KINDS = (
  "random",
  "fixed_random",
  "factorized_random",
  "dense",
  "factorized_dense",
  "dot",
)


@attention("synthesizer")
def synthesizer(
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Callable[[jax.Array], jax.Array],
  param: Callable[..., Any],
  draw: Callable[..., jax.Array],
  project: Callable[[str], jax.Array],
  max_len: int,
  kind: str = "random",
  factor: int = 8,
  causal: bool = False,
) -> jax.Array:
  """softmax(S) v with logits S [n, n] of each head from one of six sources.

  `kind`, or several joined by "+" (a mixture, with learned convex weights):

    random: a parameter. fixed_random: drawn, and kept.
    factorized_random: R_1 R_2.T with R [max_len, factor].
    dense: W_2 relu(W_1 x_i), a row of max_len logits from the token alone.
    factorized_dense: A_i[j mod a] B_i[j // a] from two such maps to about
      sqrt(max_len) each.
    dot: q k.T / sqrt(e), as in the Transformer.

  All but "dot" have parameters for max_len positions, and time and memory grow
  as n^2 as in softmax attention.

  Source: Tay et al. 2021, https://arxiv.org/abs/2005.00743, section 3. Differs
  from LRA's code: heads and positions are not mixed by a reshape, padding is
  never seen, and a mixture weighs its parts (there: their sum).

  Shapes: v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  kinds = [choose("kind of synthesizer", k, KINDS) for k in kind.split("+")]
  if len(set(kinds)) < len(kinds) or factor < 1:
    raise UserError(
      f"kind={kind!r}, factor={factor}: name a kind once, and choose a factor "
      "of at least 1."
    )
  h, n, e = v.shape[1:]
  normal = nn.initializers.normal

  def dense(name: str, size: int) -> jax.Array:
    hidden = wide(jax.nn.relu(project(f"{name}_hidden")))
    w = param(f"{name}_kernel", normal(e**-0.5), (h, e, size))
    bias = param(f"{name}_bias", nn.initializers.zeros, (h, size))
    return jnp.einsum("bhne,hem->bhnm", hidden, w) + bias[None, :, None]

  def source(kind: str) -> jax.Array:
    """Logits [b, h, n, n], or [1, h, n, n] for all samples."""
    square = (h, max_len, max_len)
    if kind == "random":
      return param(kind, normal(1.0), square)[None, :, :n, :n]
    if kind == "fixed_random":
      drawn = draw(kind, lambda key: jax.random.normal(key, square))
      return drawn[None, :, :n, :n]
    if kind == "factorized_random":
      init, shape = normal(factor**-0.25), (h, max_len, factor)
      r = [param(f"{kind}_{i}", init, shape)[None, :, :n] for i in (1, 2)]
      return dot(*r)
    if kind == "dense":
      return dense(kind, max_len)[..., :n]
    if kind == "factorized_dense":
      a = math.isqrt(max_len - 1) + 1
      j, b = jnp.arange(n), -(-max_len // a)
      first, second = dense(f"{kind}_1", a), dense(f"{kind}_2", b)
      return first[..., j % a] * second[..., j // a]
    return dot(project("query"), project("key")) / e**0.5

  if len(kinds) == 1:
    logits = source(kind)
  else:
    weights = jax.nn.softmax(
      param("mixture", nn.initializers.zeros, (len(kinds),))
    )
    logits = sum(w * source(one) for w, one in zip(weights, kinds, strict=True))
  logits = jnp.broadcast_to(logits, (len(v), h, n, n))
  weights = dropout(weigh(logits, seen_keys(mask, causal))).astype(v.dtype)
  return jnp.matmul(weights, v)
