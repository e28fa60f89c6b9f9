"""Performer: softmax attention by positive random features (FAVOR+)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.errors import UserError
from jaxformers.models.attention import attention, wide
from jaxformers.models.mixers.blocked import merge, split
from jaxformers.models.mixers.linear import by_features
from jaxformers.models.mixers.softmax import HIGHEST, earlier
from jaxformers.models.variants import MODELS, Variant

MODELS.register("performer")(Variant("performer"))

CHUNK = 16  # Tokens that the causal form takes at a time.
LOWEST = -1e30  # An exponent that is nothing beside any other, and finite.
stop_gradient = jax.lax.stop_gradient


def orthogonal_features(
  key: jax.Array, h: int, count: int, e: int
) -> jax.Array:
  """Normal vectors, orthogonal within blocks of e -> float32 [h, count, e].

  Directions from the QR decomposition of a normal matrix, lengths from normal
  vectors of their own.
  """
  blocks = -(-count // e)
  directions, lengths = jax.random.split(key)
  q, r = jnp.linalg.qr(jax.random.normal(directions, (h, blocks, e, e)))
  # Signs of R's diagonal make Q uniform.
  q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
  rows = jnp.swapaxes(q, -1, -2).reshape(h, -1, e)[:, :count]
  norms = jnp.linalg.norm(jax.random.normal(lengths, (h, count, e)), axis=-1)
  return rows * norms[..., None]


@attention("performer")
def performer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  draw: Callable[..., jax.Array],
  num_features: int = 128,
  epsilon: float = 0.0,
  causal: bool = False,
) -> jax.Array:
  """Attention with the kernel phi(q) . phi(k), of mean exp(q . k / sqrt(e)).

  phi(x) = m^-1/2 exp(w x - |x|^2 / 2) for m = `num_features` orthogonal rows w
  of each head, x scaled by e^-1/4. The stabilisers cancel: a maximum for each
  feature over the keys that are seen, and one for each query, so that every
  denominator is at least 1.

  Source: Choromanski et al. 2021, https://arxiv.org/abs/2009.14794, the
  positive features for the softmax kernel and section 2.4. Differs from the
  code that Skyformer took: scaled once, not twice; padding is no key; no sample
  sees the maxima of its batch mates. Its phi(x) is exp(w x - |x|^2 / 2 - max) +
  `epsilon` with 1e-4 and the maximum of w x, for a query over its features and
  for keys over all; given here, over those of a sample and head. It lets the
  past see that maximum, so not together with `causal`.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  `draw` gives "features": [h, num_features, e].
  """
  if num_features < 1:
    raise UserError(f"num_features={num_features}: at least one is needed.")
  if epsilon < 0 or (epsilon and causal):
    raise UserError(
      f"epsilon={epsilon} with causal={causal}: choose 0, or a positive "
      "epsilon without causal."
    )
  h, e = q.shape[1], q.shape[-1]
  w = draw("features", lambda key: orthogonal_features(key, h, num_features, e))
  q, k = (wide(a) * e**-0.25 for a in (q, k))
  q_half, k_half = (jnp.square(a).sum(-1, keepdims=True) / 2 for a in (q, k))
  q, k = (jnp.einsum("bhne,hfe->bhnf", a, w, precision=HIGHEST) for a in (q, k))
  k = jnp.where(mask[:, None, :, None], k, -jnp.inf)
  if epsilon:
    # Beside epsilon the maxima do not cancel, so their gradients count.
    tops = (_last_max(q), _last_max(k.reshape(*k.shape[:2], 1, -1)))
    q, k = (
      jnp.exp(a - half - jnp.maximum(top, LOWEST)) + epsilon
      for a, half, top in zip((q, k), (q_half, k_half), tops, strict=True)
    )
    k = jnp.where(mask[:, None, :, None], k, 0)
    return by_features(q, k, v, causal=False)
  q, k = q - q_half, k - k_half
  if causal:
    return _causal(q, k, v)
  # A maximum that cancels is a constant.
  top = stop_gradient(jnp.maximum(k.max(2, keepdims=True), LOWEST))
  k, q = jnp.exp(k - top), q + top
  return by_features(
    jnp.exp(q - stop_gradient(q.max(-1, keepdims=True))), k, v, causal=False
  )


def _last_max(x: jax.Array) -> jax.Array:
  """Returns the maximum along the last axis of x [..., f] -> [..., 1].

  Its gradient goes to the place of the first maximum, not to entries that equal
  it: a compiler that computes x twice may round it differently.
  """
  return jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1)


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """sum_j<=i phi(q_i) . phi(k_j) v_j over the sum of the weights.

  In chunks. The sums over the chunks before are kept relative to the greatest
  exponent of each feature so far; within a chunk exponents are added before
  they are taken, so that no later key has a say in how an earlier is scaled.

  Args:
    q, k: exponents of the features, [b, h, n, f]; k is -inf at padding.
    v: [b, h, n, e].
  """
  n, dtype = q.shape[2], v.dtype
  v = wide(v)
  v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
  k = jnp.maximum(k, LOWEST)
  q, k, v = (jnp.moveaxis(split(a, CHUNK), 2, 0) for a in (q, k, v))

  @jax.checkpoint
  def chunk(
    past: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    (top, total), (q, k, v) = past, part
    pairs = q[:, :, :, None] + k[:, :, None]  # [b, h, i, j, f]
    seen = earlier(CHUNK)[None, None, :, :, None]
    pairs = jnp.where(seen, pairs, LOWEST)
    before = q + top
    most = jnp.maximum(before.max(-1), pairs.max((-1, -2)))
    most = stop_gradient(most)[..., None]
    inside = jnp.where(seen, jnp.exp(pairs - most[..., None]), 0).sum(-1)
    y = jnp.einsum("bhij,bhje->bhie", inside, v)
    y = y + jnp.einsum("bhif,bhfe->bhie", jnp.exp(before - most), total)
    new = stop_gradient(jnp.maximum(top, k.max(2, keepdims=True)))
    total = jnp.swapaxes(jnp.exp(top - new), -1, -2) * total
    total = total + jnp.einsum("bhjf,bhje->bhfe", jnp.exp(k - new), v)
    return (new, total), y

  b, h, _, f = q.shape[1:]
  start = (
    jnp.full((b, h, 1, f), LOWEST, q.dtype),
    jnp.zeros((b, h, f, v.shape[-1]), v.dtype),
  )
  _, y = jax.lax.scan(chunk, start, (q, k, v))
  y = merge(jnp.moveaxis(y, 0, 2), n)
  return (y[..., :-1] / y[..., -1:]).astype(dtype)
