"""Softmax attention of the Transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import Share
from jaxformers.models.attention import Cache, attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.flash import Form, attend
from jaxformers.models.mixers.scores import dot, hide, weigh
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("transformer")(Variant("softmax"))
MODELS.register("transformer_rezero")(
  Variant("softmax", "rezero", source="Bachlechner et al. 2021")
)
MODELS.register("transformer_orthogonal")(
  Variant("softmax", fixed={"orthogonal": True}, source="TransJect, table 1")
)
MODELS.register("capped_transformer")(
  Variant(
    "softmax",
    "averaged",
    fixed={"use_bias": False, "fidelity": 0.0, "learn_fidelity": False},
    defaults={"exponent": 1.0, "rotary": True},
    source="Newhouse et al. 2025",
  )
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


def step(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  cache: Cache,
  exponent: float,
  sink: bool,
  centred: bool,
) -> jax.Array:
  """Computes causal attention of new tokens to these and to cached tokens."""
  scale = q.shape[-1] ** -exponent
  score = _sink(cache.module.param, q.shape[1]) if sink else None
  return attend_cached(
    q, k, v, cache=cache, scale=scale, sink=score, centred=centred
  )


def _sink(param: Callable[..., jax.Array], heads: int) -> jax.Array:
  """Returns the score of the sink of each head, [h]."""
  return param("sink", jax.nn.initializers.zeros, (heads,))


def attend_cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  cache: Cache,
  scale: float = 1.0,
  precision: Any = None,
  sink: jax.Array | None = None,
  centred: bool = False,
) -> jax.Array:
  """Returns softmax(scale q k.T) v of new tokens, and caches k and v.

  The weights have the dropout of the cache.

  Args:
    q, k, v: queries, keys and values of the new tokens, [b, h, n, e].
    cache: cache of earlier tokens.
    scale: factor of the scores.
    precision: precision of q k.T; None for the default.
    sink: score of a key with the value 0 in each head, [h], or None.
    centred: True to subtract the mean of the values that a token sees.
  """
  past_k, past_v, seen = cache.past(k, v)
  # Read earlier tokens apart: `vmap` over new tokens then shares their keys.
  parts = [dot(q, keys, precision) for keys in (past_k, k)]
  scores = jnp.concatenate(parts, -1) * scale
  weights = weigh(scores, seen)
  if sink is not None:
    # The share of the keys is 1 / (1 + exp(sink) / sum of exp(scores)).
    total = jax.nn.logsumexp(hide(scores, seen), -1, keepdims=True)
    weights = weights * jax.nn.sigmoid(total - wide(sink)[None, :, None, None])
  weights = cache.dropout(weights)
  if centred:
    weights = weights - weigh(jnp.zeros_like(scores), seen)
  weights = weights.astype(v.dtype)
  past, new = jnp.split(weights, [past_k.shape[2]], -1)
  y = jnp.matmul(past, past_v) + jnp.matmul(new, v)
  cache.append(k, v, after=y)
  return y


@attention("softmax", step=step, segments=True)
def softmax(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  param: Callable[..., jax.Array],
  causal: bool = False,
  exponent: Share = 0.5,
  sink: bool = False,
  centred: bool = False,
) -> jax.Array:
  """Softmax attention: softmax(q k.T / sqrt(e)) v, with float32 weights.

  Time grows as n^2 and memory as n. `exponent` is the power of e that divides
  the scores; 1 keeps them bounded as heads grow (Yang et al. 2022,
  https://arxiv.org/abs/2203.03466, definition 4.1). `sink` adds to every head a
  key with the value 0 and a learned score, which starts at 0 (gpt-oss, OpenAI
  2025, https://arxiv.org/abs/2508.10925). `centred` subtracts the mean of the
  values that a token sees; without a sink and dropout, the rows of weights sum
  to 0 (Ali et al. 2023, https://arxiv.org/abs/2306.01610).

  Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens;
  or numbers of packed rows.
  """
  form = Form(causal, scale=q.shape[-1] ** -exponent)
  score = _sink(param, q.shape[1]) if sink else None
  y = attend(q, k, v, mask, dropout, form, score)
  if not centred:
    return y
  # The mean of the values is attention with equal scores.
  zero = jnp.zeros_like(q[..., :1])
  return y - attend(zero, zero, v, mask, Dropout(), form)
