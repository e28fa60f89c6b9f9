"""Synthesizer: attention logits without products of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import Dropout, attention, wide
from jaxformers.models.mixers.scores import dot, seen_keys, weigh
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


@attention("synthesizer", growth="n^2")
def synthesizer(
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  param: Callable[..., Any],
  draw: Callable[..., jax.Array],
  project: Callable[[str], jax.Array],
  max_len: int,
  kind: str = "random",
  factor: int = 8,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention softmax(S) v with synthetic logits S [n, n] of each head.

  `kind` names the source of S; several kinds joined by "+" give a mixture with
  learned convex weights:

    random: a parameter. fixed_random: drawn, and not trained.
    factorized_random: R_1 R_2.T with R [max_len, factor].
    dense: W_2 relu(W_1 x_i), a row of max_len logits from each token.
    factorized_dense: A_i[j mod a] B_i[j // a] from two such maps to about
      sqrt(max_len) logits each.
    dot: q k.T / sqrt(e), as in the Transformer.

  All kinds but "dot" have parameters for max_len positions. Time and memory
  grow as n^2, as in softmax attention.

  Source: Tay et al. 2021, https://arxiv.org/abs/2005.00743, section 3. Equals
  softmax attention with kind "dot". Differs from LRA's code: no reshape mixes
  heads and positions, padding is never seen, and a mixture has weights (there:
  a sum).

  Shapes: v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Check the kinds, of which each has parameters of its name.
  kinds = [choose("kind of synthesizer", k, KINDS) for k in kind.split("+")]
  if len(set(kinds)) < len(kinds) or factor < 1:
    raise UserError(
      f"kind={kind!r}, factor={factor}: name a kind once, and give a factor of "
      "at least 1."
    )
  h, n, e = v.shape[1:]
  normal = nn.initializers.normal

  def map_tokens(name: str, size: int) -> jax.Array:
    """Maps each token to `size` logits by two layers, [b, h, n, size]."""
    hidden = wide(jax.nn.relu(project(f"{name}_hidden")))
    w = param(f"{name}_kernel", normal(e**-0.5), (h, e, size))
    bias = param(f"{name}_bias", nn.initializers.zeros, (h, size))
    return jnp.einsum("bhne,hem->bhnm", hidden, w) + bias[None, :, None]

  def make_logits(kind: str) -> jax.Array:
    """Returns the logits of a kind, [b, h, n, n] or [1, h, n, n]."""
    square = (h, max_len, max_len)
    # Cut the parameters for max_len positions to the n at hand.
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
      return map_tokens(kind, max_len)[..., :n]
    if kind == "factorized_dense":
      # Give position j the product of entry j mod a and entry j // a.
      a = math.isqrt(max_len - 1) + 1
      j, b = jnp.arange(n), -(-max_len // a)
      first, second = map_tokens(f"{kind}_1", a), map_tokens(f"{kind}_2", b)
      return first[..., j % a] * second[..., j // a]
    return dot(project("query"), project("key")) / e**0.5

  # Add the logits of all kinds, with learned convex weights.
  if len(kinds) == 1:
    logits = make_logits(kind)
  else:
    mixture = param("mixture", nn.initializers.zeros, (len(kinds),))
    shares = jax.nn.softmax(mixture)
    logits = sum(
      share * make_logits(kind)
      for share, kind in zip(shares, kinds, strict=True)
    )
  # Normalise over the visible keys, and sum the values.
  logits = jnp.broadcast_to(logits, (len(v), h, n, n))
  weights = dropout(weigh(logits, seen_keys(mask, causal))).astype(v.dtype)
  return jnp.matmul(weights, v)
