"""How alike tokens become: over-smoothing, and the functional behind it.

Pure functions of arrays. Source: Nguyen et al. 2023 (NeuTRENO),
https://arxiv.org/abs/2312.00751; numbers of equations are the paper's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def cosine_similarity(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The mean cosine of all pairs of different tokens of a sample -> [b].

  (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i the tokens at length one, in
  O(n d) instead of O(n^2 d). NaN for fewer than two tokens. A token of zeros
  has cosine 0 with all.

  Source: appendix E.3.

  Args:
    x: [b, n, d].
    mask: [b, n], True at tokens.
  """
  length = jnp.linalg.norm(x, axis=-1, keepdims=True)
  unit = jnp.where(
    mask[..., None] & (length > 0), x / jnp.where(length > 0, length, 1), 0
  )
  count = mask.sum(1).astype(x.dtype)
  own = jnp.square(unit).sum((1, 2))
  pairs = count * (count - 1)
  total = jnp.square(unit.sum(1)).sum(-1) - own
  return jnp.where(pairs > 0, total / jnp.where(pairs > 0, pairs, 1), jnp.nan)


def attention_weights(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
  """softmax(q k.T / sqrt(e)) over the tokens -> [..., n, n] (equation 2).

  Args:
    q, k: [..., n, e].
    mask: [..., n], True at tokens; their number of axes is that of q less one.
  """
  scores = jnp.einsum("...ne,...me->...nm", q, k, precision=_HIGHEST)
  scores = scores / q.shape[-1] ** 0.5
  lowest = jnp.finfo(scores.dtype).min
  return jax.nn.softmax(jnp.where(mask[..., None, :], scores, lowest), -1)


def functional(v: jax.Array, weights: jax.Array) -> jax.Array:
  """J = 1/2 sum_ij w_ij |v_i - v_j|^2, how rough v is on a graph -> [...].

  Source: equation 6, its integral as a sum. The paper leaves the normalisation
  open: weights = exp(k_i . k_j / sqrt e) / n^2 is dominated by the keys' norms,
  so that layers compare by row-stochastic weights over n.

  Args:
    v: [..., n, e].
    weights: [..., n, n], not negative.
  """
  square = jnp.square(v).sum(-1)
  cross = jnp.einsum(
    "...nm,...ne,...me->...", weights, v, v, precision=_HIGHEST
  )
  rows, columns = weights.sum(-1), weights.sum(-2)
  return ((rows + columns) * square).sum(-1) / 2 - cross


def gradient(v: jax.Array, weights: jax.Array) -> jax.Array:
  """The gradient of `functional` by v -> [..., n, e].

  sum_j (v_i - v_j) (w_ij + w_ji), equation 8.
  """
  both = weights + jnp.swapaxes(weights, -1, -2)
  total = jnp.einsum("...nm,...me->...ne", both, v, precision=_HIGHEST)
  return both.sum(-1)[..., None] * v - total


def step(
  u: jax.Array,
  weights: jax.Array,
  fidelity: jax.Array | float = 0.0,
  first: jax.Array | None = None,
) -> jax.Array:
  """One Euler step of the gradient flow, each token at its own step size.

  A u + lambda (f - u) with A the rows of w + w.T at sum one: attention, and
  with lambda NeuTRENO's (equations 10, 12 and 22).

  Args:
    u: [..., n, e].
    weights: [..., n, n], not negative, k of equation 6.
    fidelity: lambda.
    first: f, [..., n, e]; needed with a fidelity.
  """
  both = weights + jnp.swapaxes(weights, -1, -2)
  both = both / both.sum(-1, keepdims=True)
  after = jnp.einsum("...nm,...me->...ne", both, u, precision=_HIGHEST)
  return after if first is None else after + fidelity * (first - u)


def gradient_cosine(
  v: jax.Array, one: jax.Array, other: jax.Array
) -> jax.Array:
  """The cosine of v - A v and v - B v, averaged over tokens -> [...].

  How near asymmetric attention comes to the gradient of J that symmetric
  attention follows (appendix E.1, table 4). Normalisations that differ from
  token to token do not matter.

  Args:
    v: [..., n, e].
    one, other: A and B, [..., n, n], rows of sum one.
  """
  slopes = [
    v - jnp.einsum("...nm,...me->...ne", w, v, precision=_HIGHEST)
    for w in (one, other)
  ]
  norms = [jnp.linalg.norm(slope, axis=-1) for slope in slopes]
  product = norms[0] * norms[1]
  inner = (slopes[0] * slopes[1]).sum(-1)
  return (inner / jnp.where(product > 0, product, 1)).mean(-1)


def head_redundancy(before: jax.Array, after: jax.Array) -> jax.Array:
  """The cosine of two layers' attention matrices, head by head -> [...].

  Source: appendix G.2.

  Args:
    before, after: [..., n, n].
  """
  inner = (before * after).sum((-1, -2))
  norms = [jnp.sqrt(jnp.square(w).sum((-1, -2))) for w in (before, after)]
  return inner / (norms[0] * norms[1])


def stationary(scores: jax.Array) -> jax.Array:
  """The stationary distribution of symmetric attention's random walk.

  pi_j = sum_i exp(s_ij) / sum_il exp(s_il) for symmetric s -> [..., n]
  (equation 19). A^m v tends to sum_j pi_j v_j at every token (equation 20).

  Args:
    scores: [..., n, n], symmetric; -inf where there is no token.
  """
  log = jax.nn.logsumexp(scores, -1)
  return jax.nn.softmax(log, -1)


def limit(
  weights: jax.Array, fidelity: jax.Array | float, first: jax.Array
) -> jax.Array:
  """Where u <- A u + lambda (f - u) goes with A fixed -> [..., n, e].

  lambda ((1 + lambda) I - A)^-1 f, which is constant over tokens only if f is
  (proposition 1). It goes there if all eigenvalues mu of A have
  |mu - lambda| < 1, so not for lambda above about 1.

  Args:
    weights: A, [..., n, n], rows of sum one.
    fidelity: lambda, positive.
    first: f, [..., n, e].
  """
  eye = jnp.eye(weights.shape[-1], dtype=weights.dtype)
  return fidelity * jnp.linalg.solve((1 + fidelity) * eye - weights, first)
