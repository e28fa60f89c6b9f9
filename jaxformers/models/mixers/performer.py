"""Performer: softmax attention by positive random features (FAVOR+)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Share, Size
from jaxformers.models.attention import attention
from jaxformers.models.mixers.blocked import merge, split
from jaxformers.models.mixers.linear import by_features
from jaxformers.models.mixers.scores import HIGHEST, earlier
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("performer")(Variant("performer"))

CHUNK = 16  # Tokens per step of the causal form.
LOWEST = -1e30  # Exponent of padding: finite, with the exponential 0.
stop_gradient = jax.lax.stop_gradient


def orthogonal_features(
  key: jax.Array, h: int, count: int, e: int
) -> jax.Array:
  """Draws normal vectors, orthogonal within blocks of e, f32 [h, count, e].

  The directions come from the QR decomposition of a normal matrix. The lengths
  are the norms of independent normal vectors.

  Args:
    key: JAX key.
    h: number of heads.
    count: number of vectors.
    e: width of a head.
  """
  blocks = -(-count // e)
  directions, lengths = jax.random.split(key)
  q, r = jnp.linalg.qr(jax.random.normal(directions, (h, blocks, e, e)))
  # Multiply by the signs of R's diagonal, which makes Q uniform (Haar).
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
  num_features: Size = 128,
  epsilon: Share = 0.0,
  causal: bool = False,
) -> jax.Array:
  """Random-feature attention with the kernel phi(q) . phi(k).

  phi(x) = m^-1/2 exp(w x - |x|^2 / 2) for m = `num_features` orthogonal rows w
  per head, where x is divided by the fourth root of its width e. The expected
  kernel is exp(q . k / sqrt(e)). Two maxima are subtracted from the exponents:
  the maximum of each feature over the visible keys, and the maximum of each
  query. They cancel, and make every denominator at least 1.

  Source: Choromanski et al. 2021, https://arxiv.org/abs/2009.14794, the
  positive features for the softmax kernel and section 2.4. Equals softmax
  attention in the limit of many features. Differs from the code that Skyformer
  took: x is scaled once, not twice; padding is not a key; no sample sees the
  maxima of the rest of its batch. That code uses
  phi(x) = exp(w x - |x|^2 / 2 - max) + 1e-4, with the maximum of w x over the
  features of a query, and over all keys and features. `epsilon` adds such a
  constant, with maxima over the keys of one sample and head. `epsilon` and
  `causal` exclude each other, since earlier tokens would see that maximum.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  `draw` returns "features", the rows w [h, num_features, e].
  """
  _check_options(num_features, epsilon, causal=causal)
  # Compute the exponents of the features.
  h, e = q.shape[1], q.shape[-1]
  w = draw("features", lambda key: orthogonal_features(key, h, num_features, e))
  q, k = (wide(a) * e**-0.25 for a in (q, k))
  q_half, k_half = (jnp.square(a).sum(-1, keepdims=True) / 2 for a in (q, k))
  # Copy w for each sample: XLA on CPUs would transpose the result of an einsum.
  w = jnp.broadcast_to(
    jnp.swapaxes(w, 1, 2)[None], (q.shape[0], h, e, w.shape[1])
  )
  q, k = (jnp.matmul(a, w, precision=HIGHEST) for a in (q, k))
  k = jnp.where(mask[:, None, :, None], k, -jnp.inf)
  if epsilon:
    # With epsilon the maxima do not cancel, so they need their gradients.
    maxima = (_last_max(q), _last_max(k.reshape(*k.shape[:2], 1, -1)))
    q, k = (
      jnp.exp(a - half - jnp.maximum(top, LOWEST)) + epsilon
      for a, half, top in zip((q, k), (q_half, k_half), maxima, strict=True)
    )
    k = jnp.where(mask[:, None, :, None], k, 0)
    return by_features(q, k, v, causal=False)
  q, k = q - q_half, k - k_half
  if causal:
    return _causal(q, k, v)
  # Subtract the maximum of each feature from k and add it to q, then subtract
  # the maximum of each query. Maxima that cancel need no gradient.
  top = stop_gradient(jnp.maximum(k.max(2, keepdims=True), LOWEST))
  k, q = jnp.exp(k - top), q + top
  return by_features(
    jnp.exp(q - stop_gradient(q.max(-1, keepdims=True))), k, v, causal=False
  )


def _check_options(num_features: int, epsilon: float, *, causal: bool) -> None:
  """Raises UserError for an invalid number of features or epsilon."""
  if num_features < 1:
    raise UserError(f"num_features={num_features} is below 1: give 1 or more.")
  if epsilon < 0 or (epsilon and causal):
    raise UserError(
      f"epsilon={epsilon} with causal={causal}: give 0, or a positive epsilon "
      "without causal."
    )


def _last_max(x: jax.Array) -> jax.Array:
  """Returns the maximum along the last axis of x [..., f] -> [..., 1].

  The gradient goes to the position of the first maximum. JAX's gradient of
  `max` goes to all entries equal to the maximum, and would miss it if the
  compiler computes x twice with different rounding.
  """
  return jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1)


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Returns sum_j<=i phi(q_i) . phi(k_j) v_j over the sum of the weights.

  Loops over chunks. The sums over earlier chunks are scaled by the greatest
  exponent of each feature so far. Within a chunk the exponents of queries and
  keys are added before the exponential, so that no later key changes the scale
  of an earlier key.

  Args:
    q, k: exponents of the features, [b, h, n, f]; k is -inf at padding.
    v: values, [b, h, n, e].
  """
  # Compute the denominator as one more channel of v.
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
    # Add the exponents of all pairs within the chunk.
    pairs = q[:, :, :, None] + k[:, :, None]  # [b, h, i, j, f]
    seen = earlier(CHUNK)[None, None, :, :, None]
    pairs = jnp.where(seen, pairs, LOWEST)
    before = q + top
    # Find the maximum of each query over this chunk and the chunks before.
    most = jnp.maximum(before.max(-1), pairs.max((-1, -2)))
    most = stop_gradient(most)[..., None]
    # Sum over the tokens of the chunk up to i, then over the earlier chunks.
    inside = jnp.where(seen, jnp.exp(pairs - most[..., None]), 0).sum(-1)
    y = jnp.einsum("bhij,bhje->bhie", inside, v)
    y = y + jnp.einsum("bhif,bhfe->bhie", jnp.exp(before - most), total)
    # Add the chunk to the sums, rescaled to the new maximum of each feature.
    new = stop_gradient(jnp.maximum(top, k.max(2, keepdims=True)))
    total = jnp.swapaxes(jnp.exp(top - new), -1, -2) * total
    total = total + jnp.einsum("bhjf,bhje->bhfe", jnp.exp(k - new), v)
    return (new, total), y

  # Scan over the chunks, then divide by the last channel.
  b, h, _, f = q.shape[1:]
  start = (
    jnp.full((b, h, 1, f), LOWEST, q.dtype),
    jnp.zeros((b, h, f, v.shape[-1]), v.dtype),
  )
  _, y = jax.lax.scan(chunk, start, (q, k, v))
  y = merge(jnp.moveaxis(y, 0, 2), n)
  return (y[..., :-1] / y[..., -1:]).astype(dtype)
