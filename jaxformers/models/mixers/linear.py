"""Linear Transformer: attention by feature maps, linear in the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxformers.models.attention import Cache, attention
from jaxformers.models.mixers.blocked import merge, split
from jaxformers.models.mixers.scores import earlier
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("linear_transformer")(Variant("linear"))

CHUNK = 64  # Tokens per step of the causal form.


def by_features(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  cache: Cache | None = None,
) -> jax.Array:
  """Returns sum_j (q_i . k_j) v_j / sum_j (q_i . k_j), with 0 / 0 = 0.

  j runs over all tokens, or over the tokens up to i if causal.

  Args:
    q, k: features of queries and keys, float32 [b, h, n, f], not negative; k is
      0 at padding.
    v: values [b, h, n, e].
    causal: True for sums up to i.
    cache: cache with the sums over earlier tokens; None if not decoding.

  Returns:
    The outputs [b, h, n, e] in the dtype of v.
  """
  dtype, v = v.dtype, wide(v)
  if causal:
    # Compute the denominator in the same loop, as one more channel of v.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
    y = sums(q, k, v, causal=True)
    if cache is not None:
      y = y + _earlier_sums(q, k, v, cache)
    y, total = y[..., :-1], y[..., -1:]
  else:
    y = sums(q, k, v, causal=False)
    # Sum the keys by a product, as `parallel.column_sums` does.
    ones = jnp.ones(k.shape[2:3], k.dtype)
    total = jnp.einsum("bhnf,n->bhf", k, ones)
    total = jnp.einsum("bhnf,bhf->bhn", q, total)[..., None]
  # Divide; a query without visible keys gets 0.
  y = _quotient(y, jnp.where(total > 0, total, 1))
  return jnp.where(total > 0, y, 0).astype(dtype)


@jax.custom_jvp
def _quotient(y: jax.Array, total: jax.Array) -> jax.Array:
  """Returns y / total; its derivative does not square a small total."""
  return y / total


@_quotient.defjvp
def _quotient_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (y, total), (dy, dtotal) = primals, tangents
  quotient = _quotient(y, total)
  return quotient, (dy - quotient * dtotal) / total


def _earlier_sums(
  q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache
) -> jax.Array:
  """Returns q_i . sum_j k_j v_j over the cached tokens, [b, h, n, e].

  Adds the new tokens to the cached sums.
  """
  past = cache.recall("sums")
  if past is None:
    past = jnp.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]), v.dtype)
  # The cached sums are sum_j k_j v_j^T, [b, h, f, e].
  cache.remember("sums", past + jnp.einsum("bhnf,bhne->bhfe", k, v))
  return jnp.einsum("bhnf,bhfe->bhne", q, past)


def sums(
  q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool
) -> jax.Array:
  """Returns sum_j (q_i . k_j) v_j [b, h, n, e], over all j or up to i.

  Args:
    q, k: features of queries and keys, float32 [b, h, n, f]; k is 0 at padding.
    v: values, float32 [b, h, n, e].
    causal: True for sums up to i. Causal sums are computed in chunks, so that
      the backward pass stores one set of sums per chunk, not one per token.
  """
  # Causal sums need a loop; the other sums are two products.
  if causal:
    return _causal(q, k, v)[:, :, : q.shape[2]]
  return jnp.einsum("bhnf,bhfe->bhne", q, jnp.einsum("bhnf,bhne->bhfe", k, v))


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  # Cut the tokens into chunks, [chunks, b, h, CHUNK, f or e].
  q, k, v = (jnp.moveaxis(split(a, CHUNK), 2, 0) for a in (q, k, v))

  @jax.checkpoint
  def chunk(
    past: jax.Array, part: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, jax.Array]:
    q, k, v = part
    # Sum over the tokens of the chunk up to i, then over the earlier chunks.
    inside = jnp.einsum("bhnf,bhmf->bhnm", q, k)
    inside = jnp.where(earlier(CHUNK)[None, None], inside, 0)
    y = jnp.einsum("bhnm,bhme->bhne", inside, v)
    y = y + jnp.einsum("bhnf,bhfe->bhne", q, past)
    return past + jnp.einsum("bhnf,bhne->bhfe", k, v), y

  start = jnp.zeros((*k.shape[1:3], k.shape[-1], v.shape[-1]), v.dtype)
  # Scan over the chunks, with the sums of earlier ones as the carry.
  _, y = jax.lax.scan(chunk, start, (q, k, v))
  y = jnp.moveaxis(y, 0, 2)
  return merge(y, y.shape[2] * CHUNK)


def elu_and_one(x: jax.Array) -> jax.Array:
  """Returns elu(x) + 1, computed without the sum below 0 to keep all digits."""
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _features(
  q: jax.Array, k: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  q, k = (elu_and_one(wide(a)) for a in (q, k))
  # Set padded keys to 0, which gives them the weight 0.
  return q, jnp.where(mask[:, None, :, None], k, 0)


def step(
  q: jax.Array, k: jax.Array, v: jax.Array, *, cache: Cache
) -> jax.Array:
  """Computes causal `linear` of new tokens with cached sums of earlier ones."""
  features = _features(q, k, cache.mask)
  return by_features(*features, v, causal=True, cache=cache)


@attention("linear", step=step)
def linear(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  causal: bool = False,
) -> jax.Array:
  """Kernel attention with the kernel (elu(q) + 1) . (elu(k) + 1).

  Source: Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, equations
  5 and 7; causal: 9.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  return by_features(*_features(q, k, mask), v, causal=causal)
