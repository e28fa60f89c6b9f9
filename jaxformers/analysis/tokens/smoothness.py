"""Over-smoothing: functional J, its gradient flow, and limits of attention.

All functions are pure. The module `curves` measures them layer by layer.

Source: Nguyen et al. 2023 (NeuTRENO), https://arxiv.org/abs/2312.00751, with
the paper's numbers of equations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.models.mixers.scores import weigh

_HIGHEST = jax.lax.Precision.HIGHEST
_einsum = functools.partial(jnp.einsum, precision=_HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=_HIGHEST)


def cosine_similarity(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean cosine of pairs of distinct tokens of a sample, [b].

  With u_i the tokens scaled to length one, the mean is
  (|sum_i u_i|^2 - n) / (n (n - 1)), which costs O(n d) instead of O(n^2 d).
  The mean is NaN for fewer than two tokens. A zero vector has cosine 0 with
  every token.

  Source: appendix E.3.

  Args:
    x: hidden states, [b, n, d].
    mask: [b, n], True at tokens.
  """
  # Scale tokens to length one; padding and zero vectors stay zero.
  length = jnp.linalg.norm(x, axis=-1, keepdims=True)
  unit = jnp.where(mask[..., None], x / _divisor(length), 0)
  count = mask.sum(1).astype(x.dtype)
  pairs = count * (count - 1)
  # Subtract each token's cosine with itself from the sum over all pairs.
  squares = jnp.square(unit).sum((1, 2))
  total = jnp.square(unit.sum(1)).sum(-1) - squares
  return jnp.where(pairs > 0, total / _divisor(pairs), jnp.nan)


def residual(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns |X - 1 mean|_F / |X|_F, the share that differs from the mean, [b].

  A mean that all tokens share makes it small, as it makes the cosine large: for
  tokens of one length, its square is 1 minus the mean cosine of all pairs, each
  token with itself included. Of tokens that are nearly alike it resolves more
  digits. The ranks of `ranks` do not see the mean.

  Source: Dong et al. 2021, https://arxiv.org/abs/2103.03404, section 2, with
  Frobenius norms.

  Args:
    x, mask: arguments of `cosine_similarity`.
  """
  parts = (_centred(x, mask), jnp.where(mask[..., None], x, 0))
  norms = [jnp.sqrt(jnp.square(a).sum((1, 2))) for a in parts]
  return norms[0] / _divisor(norms[1])


def _centred(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns tokens [b, n, d] minus their mean, and 0 for padding."""
  # Subtract the first token, so that equal tokens are 0 without rounding.
  first = jnp.take_along_axis(x, mask.argmax(1)[:, None, None], 1)
  x = jnp.where(mask[..., None], x - first, 0)
  count = jnp.maximum(mask.sum(1), 1).astype(x.dtype)
  mean = x.sum(1, keepdims=True) / count[:, None, None]
  return jnp.where(mask[..., None], x - mean, 0)


def ranks(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the stable and the effective rank of centred tokens, [b] each.

  With the singular values s of X - 1 mean, they are sum s^2 / max s^2, and the
  exponential of the entropy of s / sum s (Roy and Vetterli 2007, EUSIPCO,
  definition 1). Differs from these sources, which do not subtract the mean: it
  would be the first singular vector of tokens that share a large one. Equal
  tokens have stable rank 0 and effective rank 1.

  Args:
    x, mask: arguments of `cosine_similarity`.
  """
  s = jnp.linalg.svd(_centred(x, mask), compute_uv=False)
  stable = jnp.square(s).sum(-1) / _divisor(jnp.square(s[..., 0]))
  shares = s / _divisor(s.sum(-1, keepdims=True))
  return stable, jnp.exp(jax.scipy.special.entr(shares).sum(-1))


def massive(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the greatest entry over the median entry, as absolute values, [b].

  Source: massive activations, Sun et al. 2024,
  https://arxiv.org/abs/2402.17762.

  Args:
    x, mask: arguments of `cosine_similarity`.
  """
  x = jnp.where(mask[..., None], jnp.abs(x), jnp.nan)
  return jnp.nanmax(x, (1, 2)) / _divisor(jnp.nanmedian(x, (1, 2)))


def of_weights(weights: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
  """Returns measures of attention matrices, [...] each.

  `first` is the mean weight of the first token, `missing` the mean of 1 minus
  the sum of a row (the weight of a learned sink), `column` the greatest sum of
  a column of absolute weights, `entropy` the mean entropy of a row of absolute
  weights in nats, and `second` the second singular value over the first (see
  `_singular_values`).

  Args:
    weights: [..., n, n], 0 for keys that are not visible.
    mask: [..., n], True at tokens.
  """
  weights = jnp.where(mask[..., None], weights, 0)
  count = jnp.maximum(mask.sum(-1), 1).astype(weights.dtype)
  first = jnp.take_along_axis(weights, mask.argmax(-1)[..., None, None], -1)
  size = jnp.abs(weights)
  shares = size / _divisor(size.sum(-1, keepdims=True))
  s = _singular_values(weights)
  # A matrix of one token has one singular value.
  second = s[..., 1] if s.shape[-1] > 1 else jnp.zeros_like(s[..., 0])
  return {
    "first": first.sum((-1, -2)) / count,
    "missing": 1 - weights.sum((-1, -2)) / count,
    "column": size.sum(-2).max(-1),
    "entropy": jax.scipy.special.entr(shares).sum((-1, -2)) / count,
    "second": second / _divisor(s[..., 0]),
  }


def _singular_values(x: jax.Array) -> jax.Array:
  """Returns at least the eight greatest singular values of x [..., n, n].

  For n above 128 they come from 16 steps of randomised subspace iteration with
  a fixed key, which takes a tenth of the time of a decomposition. For weights
  of normal scores and n = 512 or 1,024, the ratio of the first two is then too
  small by at most 1.4 %, and by at most 1e-4 in causal attention. Up to n = 128
  they are all singular values, without this error.

  Source: Halko, Martinsson and Tropp 2011, https://arxiv.org/abs/0909.4061,
  algorithm 4.4, of the transposed matrix.
  """
  n = x.shape[-1]
  if n <= 128:
    return jnp.linalg.svd(x, compute_uv=False)
  start = jax.random.normal(jax.random.key(0), (n, 8), x.dtype)

  def step(basis: jax.Array, _: None) -> tuple[jax.Array, None]:
    basis = jnp.linalg.qr(_matmul(x, basis))[0]
    return jnp.linalg.qr(_matmul(x.mT, basis))[0], None

  basis = jnp.broadcast_to(start, (*x.shape[:-2], *start.shape))
  basis, _ = jax.lax.scan(step, basis, None, length=16)
  return jnp.linalg.svd(_matmul(x, basis), compute_uv=False)


def _divisor(x: jax.Array) -> jax.Array:
  """Returns x where it is positive, and 1 elsewhere."""
  return jnp.where(x > 0, x, 1)


def attention_weights(
  q: jax.Array,
  k: jax.Array,
  mask: jax.Array,
  causal: bool = False,
  diagonal: bool = True,
) -> jax.Array:
  """Returns the attention weights softmax(q k.T / sqrt(e)), [..., n, n].

  The row of a query that sees no token is zero.

  Source: equation 2.

  Args:
    q, k: queries and keys, [..., n, e].
    mask: [..., n], True at tokens; the mask has one axis less than q.
    causal: True if no token sees a later token.
    diagonal: False if no token sees itself.
  """
  scores = _scores(q, k)
  seen = seen_keys(mask, causal, diagonal)
  return jnp.where(seen, weigh(scores, seen), 0)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
  """Returns the scores q k.T / sqrt(e), q and k [..., n, e] -> [..., n, n]."""
  return _einsum("...ne,...me->...nm", q, k) / q.shape[-1] ** 0.5


def seen_keys(
  mask: jax.Array, causal: bool, diagonal: bool = True
) -> jax.Array:
  """Returns the keys that a query sees, mask [..., n] -> [..., n or 1, n]."""
  n = mask.shape[-1]
  seen = mask[..., None, :]
  if causal:
    seen = seen & jnp.tri(n, dtype=bool)
  return seen if diagonal else seen & ~jnp.eye(n, dtype=bool)


def _off_diagonal(weights: jax.Array) -> jax.Array:
  """Returns weights [..., n, n] with zeros on the diagonal.

  The terms v_i - v_i are zero, so the diagonal does not matter in exact
  arithmetic. A large weight on the diagonal would absorb the other weights of a
  row when float32 sums them.
  """
  return weights * (1 - jnp.eye(weights.shape[-1], dtype=weights.dtype))


def _centre(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns v [..., n, e] minus its mean, weighted by a graph.

  Differences of tokens do not change. If tokens are nearly equal, subtracting
  the mean preserves their differences in float32.
  """
  # Weigh each token by the sum of its weights in the graph.
  share = jnp.abs(weights).sum(-1) + jnp.abs(weights).sum(-2)
  share = share / _divisor(share.sum(-1, keepdims=True))
  mean = _einsum("...n,...ne->...e", share, v)
  return v - mean[..., None, :]


def functional(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns J = 1/2 sum_ij w_ij |v_i - v_j|^2, the roughness of v, [...].

  Source: equation 6, with its integral as a sum. The paper does not state the
  normalisation of w. The weights exp(k_i . k_j / sqrt e) / n^2 are dominated by
  the norms of the keys (see `log_functional_kernel`). To compare layers, use
  row-stochastic weights divided by n.

  Args:
    v: values of the tokens, [..., n, e].
    weights: non-negative weights w of the graph, [..., n, n].
  """
  weights = _off_diagonal(weights)
  v = _centre(v, weights)
  # Use |v_i - v_j|^2 = |v_i|^2 + |v_j|^2 - 2 v_i . v_j, which avoids an array
  # [n, n, e].
  square = jnp.square(v).sum(-1)
  cross = _einsum("...nm,...ne,...me->...", weights, v, v)
  rows, columns = weights.sum(-1), weights.sum(-2)
  return ((rows + columns) * square).sum(-1) / 2 - cross


def log_functional_kernel(
  v: jax.Array, k: jax.Array, mask: jax.Array, causal: bool = False
) -> jax.Array:
  """Returns log J with the weights exp(k_i . k_j / sqrt e) / n^2, [...].

  The weights overflow float32 from |k|^2 = 88 sqrt e on, so they are computed
  relative to the largest weight. The result is -inf for fewer than two tokens.

  Source: equations 6 and 11; n is the number of tokens of the sample.

  Args:
    v, k: values and keys, [..., n, e].
    mask: [..., n], True at tokens.
    causal: True if no token sees a later token.
  """
  seen = seen_keys(mask, causal, diagonal=False) & mask[..., None]
  # Divide all weights by the largest weight; add its logarithm at the end.
  scores = jnp.where(seen, _scores(k, k), -jnp.inf)
  top = scores.max((-1, -2))
  top = jnp.where(jnp.isfinite(top), top, 0)
  rough = functional(v, jnp.exp(scores - top[..., None, None]))
  count = jnp.maximum(mask.sum(-1), 1).astype(v.dtype)
  return top + jnp.log(jnp.maximum(rough, 0)) - 2 * jnp.log(count)


def gradient(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the gradient of `functional` with respect to v, [..., n, e].

  The gradient at token i is sum_j (v_i - v_j) (w_ij + w_ji).

  Source: equation 8.
  """
  return _slope(v, weights + weights.mT)


def _slope(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns sum_j w_ij (v_i - v_j), v [..., n, e] -> [..., n, e]."""
  weights = _off_diagonal(weights)
  v = _centre(v, weights)
  # The sum is v_i sum_j w_ij - sum_j w_ij v_j.
  total = _einsum("...nm,...me->...ne", weights, v)
  return weights.sum(-1)[..., None] * v - total


def step(
  u: jax.Array,
  weights: jax.Array,
  fidelity: jax.Array | float = 0.0,
  first: jax.Array | None = None,
) -> jax.Array:
  """Returns one Euler step of the gradient flow, with a step size per token.

  The step is A u + lambda (f - u), where A is w + w.T with every row divided by
  its sum. With lambda = 0 this is attention; with lambda > 0 it is NeuTRENO's
  attention.

  Source: equations 10, 12 and 22.

  Args:
    u: tokens, [..., n, e].
    weights: non-negative weights k of equation 6, [..., n, n].
    fidelity: weight lambda of the fidelity term.
    first: values f of the first layer, [..., n, e]; needed for a fidelity term.
  """
  # Make the weights symmetric, and normalise each row to sum one.
  both = weights + weights.mT
  both = both / both.sum(-1, keepdims=True)
  after = _einsum("...nm,...me->...ne", both, u)
  return after if first is None else after + fidelity * (first - u)


def flow(
  u: jax.Array,
  weights: jax.Array,
  time: jax.Array | float,
  fidelity: jax.Array | float = 0.0,
  first: jax.Array | None = None,
) -> jax.Array:
  """Returns the gradient flow at a time, in closed form, [..., n, e].

  The flow solves du/dt = -grad E(u), where grad E(u) is `gradient` plus
  lambda (u - f). E never increases along the flow. Without a fidelity term, all
  tokens converge to their mean if the graph of `weights` is connected. With a
  fidelity term, the flow converges to the minimum of E. The solution uses the
  eigenvectors of the graph's Laplacian, and is exact up to rounding.

  Source: equations 9 and 21.

  Args:
    u: tokens at time 0, [..., n, e].
    weights: non-negative weights k of equation 6, [..., n, n].
    time: non-negative time of the flow; a scalar or [...].
    fidelity: weight lambda of the fidelity term.
    first: values f of the first layer, [..., n, e]; needed for a fidelity term.

  Raises:
    UserError: for a fidelity without `first`.
  """
  has_no_fidelity = isinstance(fidelity, (int, float)) and not fidelity
  if first is None and not has_no_fidelity:
    raise UserError(f"fidelity={fidelity} pulls towards `first`: give `first`.")
  # Decompose the graph's Laplacian.
  both = weights + weights.mT
  eye = jnp.eye(both.shape[-1], dtype=both.dtype)
  rates, basis = jnp.linalg.eigh(both.sum(-1)[..., None] * eye - both)
  rates = jnp.maximum(rates, 0) + fidelity
  # Each coordinate decays exponentially from its start to its end.
  decay = jnp.exp(-rates * jnp.asarray(time)[..., None])[..., None]
  into = basis.mT
  # The end is 0, or lambda / (rate + lambda) times the coordinate of f.
  end = jnp.zeros_like(u)
  if first is not None:
    share = jnp.where(rates > 0, fidelity / _divisor(rates), 0)
    end = share[..., None] * _matmul(into, first)
  return _matmul(basis, end + decay * (_matmul(into, u) - end))


def gradient_cosine(
  v: jax.Array, a: jax.Array, b: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns the cosine of v - A v and v - B v, averaged over tokens, [...].

  The cosine measures how well asymmetric attention (A) follows the gradient of
  J, as symmetric attention (B) does. Only the direction of a slope matters, so
  each row of the weights is first divided by its largest entry off the
  diagonal. Tokens without a slope are skipped, such as the first of a causal
  sequence. The mean is NaN if all tokens are skipped.

  The cosine of symmetric attention, whose queries are its keys, is 1 by
  construction. Differs from the paper, which prints 0.982 and 0.976 for
  Sym-DeiT.

  Source: appendix E.1, table 4.

  Args:
    v: values of the tokens, [..., n, e].
    a, b: weights A and B, [..., n, n]; their diagonals are ignored.
    mask: [..., n], True at tokens.
  """
  # Compute the slopes of both attentions, scaled to length one.
  directions = []
  for weights in (a, b):
    weights = _off_diagonal(weights)
    greatest = jnp.abs(weights).max(-1, keepdims=True)
    slope = _slope(v, weights / _divisor(greatest))
    norm = jnp.linalg.norm(slope, axis=-1, keepdims=True)
    directions.append(slope / _divisor(norm))
    mask = mask & (norm[..., 0] > 0)
  cosine = (directions[0] * directions[1]).sum(-1)
  return cosine.mean(-1, where=mask)


def head_redundancy(before: jax.Array, after: jax.Array) -> jax.Array:
  """Returns the cosine of the attention of two layers, head by head, [...].

  Source: appendix G.2.

  Args:
    before, after: attention matrices, [..., n, n].
  """
  inner = (before * after).sum((-1, -2))
  norms = [jnp.sqrt(jnp.square(w).sum((-1, -2))) for w in (before, after)]
  return inner / (norms[0] * norms[1])


def stationary(scores: jax.Array) -> jax.Array:
  """Returns the stationary distribution of symmetric attention, [..., n].

  The distribution is pi_j = sum_i exp(s_ij) / sum_il exp(s_il). At every token,
  A^m v tends to sum_j pi_j v_j as m grows.

  Source: equations 19 and 20.

  Args:
    scores: symmetric scores s, [..., n, n]; -inf at padding.
  """
  # Sum the rows in logarithms, which does not overflow.
  log = jax.nn.logsumexp(scores, -1)
  return jax.nn.softmax(log, -1)


def limit(
  weights: jax.Array, fidelity: jax.Array | float, first: jax.Array
) -> jax.Array:
  """Returns the limit of u <- A u + lambda (f - u) with A fixed, [..., n, e].

  The limit is lambda ((1 + lambda) I - A)^-1 f. It is constant over tokens only
  if f is. The iteration converges if every eigenvalue mu of A satisfies
  |mu - lambda| < 1, which fails for lambda above about 1.

  Source: proposition 1.

  Args:
    weights: attention A, [..., n, n], with rows of sum one.
    fidelity: weight lambda > 0 of the fidelity term.
    first: values f of the first layer, [..., n, e].
  """
  eye = jnp.eye(weights.shape[-1], dtype=weights.dtype)
  return fidelity * jnp.linalg.solve((1 + fidelity) * eye - weights, first)
