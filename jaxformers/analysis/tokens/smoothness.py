"""Over-smoothing of tokens: its functional, its slope, and limits of attention.

Pure functions; `curves` measures them layer by layer.

Source: Nguyen et al. 2023 (NeuTRENO), https://arxiv.org/abs/2312.00751; numbers
of equations are the paper's.
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
  """Returns the mean cosine of pairs of different tokens of a sample, [b].

  (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i the tokens at length one, in
  O(n d) instead of O(n^2 d). NaN for fewer than two tokens. A token of zeros
  has cosine 0 with all.

  Source: appendix E.3.

  Args:
    x: [b, n, d].
    mask: [b, n], True at tokens.
  """
  # Scale tokens to length one; padding and zeros stay zero.
  length = jnp.linalg.norm(x, axis=-1, keepdims=True)
  unit = jnp.where(mask[..., None], x / _divisor(length), 0)
  count = mask.sum(1).astype(x.dtype)
  pairs = count * (count - 1)
  # Take each token's cosine with itself from the sum over all pairs.
  squares = jnp.square(unit).sum((1, 2))
  total = jnp.square(unit.sum(1)).sum(-1) - squares
  return jnp.where(pairs > 0, total / _divisor(pairs), jnp.nan)


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
  """Returns softmax(q k.T / sqrt(e)) over the tokens, [..., n, n].

  A row that sees no token is zero.

  Source: equation 2.

  Args:
    q, k: queries and keys, [..., n, e].
    mask: [..., n], True at tokens; it has one axis less than q.
    causal: True if no token sees a later one.
    diagonal: False if no token sees itself.
  """
  scores = _scores(q, k)
  seen = seen_keys(mask, causal, diagonal)
  return jnp.where(seen, weigh(scores, seen), 0)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
  """Returns q k.T / sqrt(e) of q and k [..., n, e] -> [..., n, n]."""
  return _einsum("...ne,...me->...nm", q, k) / q.shape[-1] ** 0.5


def seen_keys(
  mask: jax.Array, causal: bool, diagonal: bool = True
) -> jax.Array:
  """Returns which keys a query sees; mask [..., n] -> [..., n or 1, n]."""
  n = mask.shape[-1]
  seen = mask[..., None, :]
  if causal:
    seen = seen & jnp.tri(n, dtype=bool)
  return seen if diagonal else seen & ~jnp.eye(n, dtype=bool)


def _off_diagonal(weights: jax.Array) -> jax.Array:
  """Returns weights [..., n, n] with zeros on the diagonal.

  A term v_i - v_i is zero whatever its weight. Where a token mostly attends to
  itself, that weight is all that float32 keeps of a sum over the row.
  """
  return weights * (1 - jnp.eye(weights.shape[-1], dtype=weights.dtype))


def _centre(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns v [..., n, e] less its mean by the weights of a graph.

  Differences stay as they are. Where tokens are nearly alike, float32 keeps
  them only without what all tokens share.
  """
  # Weigh tokens by how much the graph uses them.
  share = jnp.abs(weights).sum(-1) + jnp.abs(weights).sum(-2)
  share = share / _divisor(share.sum(-1, keepdims=True))
  mean = _einsum("...n,...ne->...e", share, v)
  return v - mean[..., None, :]


def functional(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns J = 1/2 sum_ij w_ij |v_i - v_j|^2, the roughness of v, [...].

  Source: equation 6, its integral as a sum. The paper leaves the normalisation
  open: weights = exp(k_i . k_j / sqrt e) / n^2 is dominated by the keys' norms
  (see `log_functional_kernel`), so that layers compare by row-stochastic
  weights over n.

  Args:
    v: values of the tokens, [..., n, e].
    weights: weights w of the graph, [..., n, n], not negative.
  """
  weights = _off_diagonal(weights)
  v = _centre(v, weights)
  # |v_i - v_j|^2 = |v_i|^2 + |v_j|^2 - 2 v_i . v_j, without [n, n, e].
  square = jnp.square(v).sum(-1)
  cross = _einsum("...nm,...ne,...me->...", weights, v, v)
  rows, columns = weights.sum(-1), weights.sum(-2)
  return ((rows + columns) * square).sum(-1) / 2 - cross


def log_functional_kernel(
  v: jax.Array, k: jax.Array, mask: jax.Array, causal: bool = False
) -> jax.Array:
  """Returns log J under the weights exp(k_i . k_j / sqrt e) / n^2, [...].

  The weights themselves overflow float32 from |k|^2 = 88 sqrt e on, so the
  greatest is taken out before they are made. -inf for fewer than two tokens.

  Source: equations 6 and 11; n is the number of tokens of the sample.

  Args:
    v, k: values and keys, [..., n, e].
    mask: [..., n], True at tokens.
    causal: True if no token sees a later one.
  """
  seen = seen_keys(mask, causal, diagonal=False) & mask[..., None]
  # Divide all weights by the greatest, and add its logarithm at the end.
  scores = jnp.where(seen, _scores(k, k), -jnp.inf)
  top = scores.max((-1, -2))
  top = jnp.where(jnp.isfinite(top), top, 0)
  rough = functional(v, jnp.exp(scores - top[..., None, None]))
  count = jnp.maximum(mask.sum(-1), 1).astype(v.dtype)
  return top + jnp.log(jnp.maximum(rough, 0)) - 2 * jnp.log(count)


def gradient(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the gradient of `functional` by v, [..., n, e].

  sum_j (v_i - v_j) (w_ij + w_ji).

  Source: equation 8.
  """
  return _slope(v, weights + weights.mT)


def _slope(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns sum_j w_ij (v_i - v_j) of v [..., n, e] -> [..., n, e]."""
  weights = _off_diagonal(weights)
  v = _centre(v, weights)
  total = _einsum("...nm,...me->...ne", weights, v)
  return weights.sum(-1)[..., None] * v - total


def step(
  u: jax.Array,
  weights: jax.Array,
  fidelity: jax.Array | float = 0.0,
  first: jax.Array | None = None,
) -> jax.Array:
  """Takes one Euler step of the gradient flow, with a step size for each token.

  A u + lambda (f - u) with A the rows of w + w.T at sum one: attention, and
  with lambda NeuTRENO's.

  Source: equations 10, 12 and 22.

  Args:
    u: tokens, [..., n, e].
    weights: weights k of equation 6, [..., n, n], not negative.
    fidelity: weight lambda of the fidelity term.
    first: values f of the first layer, [..., n, e]; needed with a fidelity.
  """
  # Make the weights symmetric, and then each row's sum one.
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

  du/dt = -grad E(u), with grad E of `gradient` and lambda (u - f). The flow
  goes to the mean of all tokens, which it reaches where `weights` joins all of
  them; with a fidelity it goes to the minimum of E. E never rises along it. The
  eigenvectors of the Laplacian do the integration, exact but for rounding.

  Source: equations 9 and 21.

  Args:
    u: tokens at time 0, [..., n, e].
    weights: weights k of equation 6, [..., n, n], not negative.
    time: time of the flow, not negative; a scalar or [...].
    fidelity: weight lambda of the fidelity term.
    first: values f of the first layer, [..., n, e]; needed with a fidelity.

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
  # Each coordinate decays at its rate from its start to its end.
  decay = jnp.exp(-rates * jnp.asarray(time)[..., None])[..., None]
  into = basis.mT
  end = jnp.zeros_like(u)
  if first is not None:
    share = jnp.where(rates > 0, fidelity / _divisor(rates), 0)
    end = share[..., None] * _matmul(into, first)
  return _matmul(basis, end + decay * (_matmul(into, u) - end))


def gradient_cosine(
  v: jax.Array, a: jax.Array, b: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns the cosine of v - A v and v - B v, averaged over tokens, [...].

  It says how near asymmetric attention comes to the gradient of J, which
  symmetric attention follows. Only the direction of a slope matters, so each
  row of the weights is first divided by its greatest entry off the diagonal.
  Tokens without a slope, such as the first of a causal sequence, are left out;
  NaN where all are.

  Of symmetric attention, whose queries are its keys, it is 1 by construction;
  the paper prints 0.982 and 0.976 for Sym-DeiT.

  Source: appendix E.1, table 4.

  Args:
    v: values of the tokens, [..., n, e].
    a, b: weights A and B, [..., n, n]; their diagonals play no part.
    mask: [..., n], True at tokens.
  """
  # Slopes of both attentions, at length one.
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
  """Returns the cosine of two layers' attention, head by head, [...].

  Source: appendix G.2.

  Args:
    before, after: attention matrices, [..., n, n].
  """
  inner = (before * after).sum((-1, -2))
  norms = [jnp.sqrt(jnp.square(w).sum((-1, -2))) for w in (before, after)]
  return inner / (norms[0] * norms[1])


def stationary(scores: jax.Array) -> jax.Array:
  """Returns the stationary distribution of symmetric attention, [..., n].

  pi_j = sum_i exp(s_ij) / sum_il exp(s_il) for symmetric s. A^m v tends to
  sum_j pi_j v_j at every token.

  Source: equations 19 and 20.

  Args:
    scores: scores s, [..., n, n], symmetric; -inf where there is no token.
  """
  # Sums of rows in logarithms, so that nothing overflows.
  log = jax.nn.logsumexp(scores, -1)
  return jax.nn.softmax(log, -1)


def limit(
  weights: jax.Array, fidelity: jax.Array | float, first: jax.Array
) -> jax.Array:
  """Returns the limit of u <- A u + lambda (f - u) with A fixed, [..., n, e].

  lambda ((1 + lambda) I - A)^-1 f, which is constant over tokens only if f is.
  The iteration converges if all eigenvalues mu of A have |mu - lambda| < 1, so
  not for lambda above about 1.

  Source: proposition 1.

  Args:
    weights: attention A, [..., n, n], rows of sum one.
    fidelity: weight lambda of the fidelity term, positive.
    first: values f of the first layer, [..., n, e].
  """
  eye = jnp.eye(weights.shape[-1], dtype=weights.dtype)
  return fidelity * jnp.linalg.solve((1 + fidelity) * eye - weights, first)
