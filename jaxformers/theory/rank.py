"""Exact separation ranks of linearised self-attention, modulo a prime.

The network is equation 3 of Levine et al. 2020 (arXiv 2006.12467) in its
compact form. With the Gram matrix S_1 of the tokens, layer l computes
T_l = sum_h W_O W_V S_l W_K.T W_Q, y_l = T_l y_(l-1), S_(l+1) = T_l S_l T_l.T.
With a residual connection, T_l + I replaces T_l. The docstring of the command
`rank` explains why the rank is exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table
from jaxformers.theory import bounds

PRIME = 2**31 - 1
_FIRST_RANK = 24  # First guess of the rank; the grid has 8 points more.


class Weights(NamedTuple):
  """Products of a network's weights, arrays [layers, heads, d, d].

  Attributes:
    values: W_O W_V.
    scores: W_K.T W_Q.
  """

  values: Any
  scores: Any


@dataclasses.dataclass(frozen=True)
class Setting:
  """Network, partition of its tokens, and output entry to measure.

  Attributes:
    num_layers: number of layers L.
    d_model: width d.
    num_heads: number of heads H, a divisor of d.
    num_tokens: number of tokens N.
    residual: True if every layer adds its input.
    input_rank: dimension of the subspace that holds the tokens, such as the
      rank of the embedding; 0 for d.
    part: positions of the tokens of the first group; () for the first half.
    position: position of the token whose output is measured.
    channel: channel of the output.

  Raises:
    UserError: for fields that contradict each other, with the reason.
  """

  num_layers: int
  d_model: int
  num_heads: int = 1
  num_tokens: int = 2
  residual: bool = False
  input_rank: int = 0
  part: tuple[int, ...] = ()
  position: int = 0
  channel: int = 0

  def __post_init__(self) -> None:
    n, d, part = self.num_tokens, self.d_model, {*self.part}
    bounds.check_layers(self.num_layers)
    # Heads must divide the width.
    if d < 1 or self.num_heads < 1 or d % self.num_heads:
      raise UserError(
        f"num_heads={self.num_heads} does not divide d_model={d}: choose a "
        "number of heads that does."
      )
    # Both groups need tokens.
    if n < 2:
      raise UserError(
        f"num_tokens={n} is below 2: give 2 or more, a token to each group."
      )
    if not part and n % 2:
      raise UserError(
        f"num_tokens={n} is odd, so it has no balanced partition: choose an "
        "even number, or give `part`."
      )
    if not part < {*range(n)} or len(part) < len(self.part):
      raise UserError(
        f"part={self.part}: give distinct tokens of 0 to {n - 1}, and not all."
      )
    # Indices must be in their ranges.
    for name, last in {
      "position": n - 1,
      "channel": d - 1,
      "input_rank": d,
    }.items():
      if not 0 <= getattr(self, name) <= last:
        raise UserError(
          f"{name}={getattr(self, name)} is not in 0 to {last}: give a number "
          "in that range."
        )

  @property
  def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the tokens of both groups."""
    first = self.part or tuple(range(self.num_tokens // 2))
    return first, tuple(k for k in range(self.num_tokens) if k not in first)


class Rank(NamedTuple):
  """A measured separation rank.

  Attributes:
    rank: rank of the grid matrix.
    exact: True if the grid had more points than the rank. Otherwise the rank
      is a lower bound.
    points: number of points of each group, the side of the grid.
  """

  rank: int
  exact: bool
  points: int


def draw_weights(setting: Setting, seed: int) -> Weights:
  """Returns uniform random weights modulo p, int64."""
  rng = np.random.default_rng([seed, 0])
  s, width = setting, setting.d_model // setting.num_heads
  shape = (s.num_layers, s.num_heads)
  # W_Q, W_K and W_V are [L, H, d / H, d], and W_O is [L, H, d, d / H].
  into = (*shape, width, s.d_model)
  q, k, v = (rng.integers(0, PRIME, into) for _ in range(3))
  o = rng.integers(0, PRIME, (*shape, s.d_model, width))
  return Weights(_product(o, v), _product(k.mT, q))


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns matrix products modulo p, reduced after every term."""
  # A product of two entries has 62 bits: the sum of two could overflow.
  total = np.zeros((*a.shape[:-1], b.shape[-1]), np.int64)
  for k in range(a.shape[-1]):
    total = (total + a[..., :, k, None] * b[..., None, k, :]) % PRIME
  return total


def draw_tokens(
  setting: Setting, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns random tokens of both groups, int64 [count, tokens, d] modulo p.

  The first rows do not depend on `count`.
  """
  d, r = setting.d_model, setting.input_rank or setting.d_model
  # Draw a basis of a random subspace, for tokens of a lower rank than d.
  basis = np.random.default_rng([seed, 1]).integers(0, PRIME, (r, d))
  points = []
  for number, group in enumerate(setting.groups):
    # Each group has its own random stream: a larger count only adds rows.
    rng = np.random.default_rng([seed, 2 + number])
    x = rng.integers(0, PRIME, (count, len(group), r))
    points.append(_product(x, basis) if setting.input_rank else x)
  return points[0], points[1]


def grid(
  setting: Setting, weights: Weights, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
  """Returns the measured output at every pair of points, modulo p.

  Args:
    setting: setting; reads its groups, position, channel and residual.
    weights: weights modulo p.
    a, b: tokens of both groups, int64 [points, tokens, d] modulo p.

  Returns:
    int64 [points of a, points of b].
  """
  first, second = setting.groups
  # Take the token whose output is measured, [points of a, points of b, d].
  if setting.position in first:
    x = a[:, None, first.index(setting.position)]
  else:
    x = b[None, :, second.index(setting.position)]
  x = np.broadcast_to(x, (len(a), len(b), setting.d_model))
  gram_a, gram_b = (_product(y.mT, y) for y in (a, b))
  return _grid(gram_a, gram_b, x, weights, setting.residual, setting.channel)


@numba.njit(nogil=True, inline="always")
def _mod(x: Any) -> Any:
  """Returns x modulo 2^31 - 1 without a division, for 0 <= x < 2^63."""
  # 2^31 = 1 modulo 2^31 - 1, so add the high bits to the low bits.
  x = (x & PRIME) + (x >> 31)
  x = (x & PRIME) + (x >> 31)
  # Two rounds leave at most p + 2.
  return x - PRIME if x >= PRIME else x


@numba.njit(nogil=True)
def _add_product(a: Any, b: Any, out: Any) -> None:
  """Adds a @ b to `out`, modulo p."""
  for i in range(a.shape[0]):
    for j in range(b.shape[1]):
      total = out[i, j]
      for k in range(b.shape[0]):
        # Adding one product of 62 bits stays below 2^63.
        total = _mod(total + a[i, k] * b[k, j])
      out[i, j] = total


@numba.njit(nogil=True)
def _apply(a: Any, x: Any) -> Any:
  """Returns a @ x for a column x, modulo p."""
  y = np.zeros((a.shape[0], 1), np.int64)
  _add_product(a, x, y)
  return y


@numba.njit(nogil=True)
def _entry(gram: Any, x: Any, weights: Any, residual: Any, channel: Any) -> Any:
  """Returns one output channel of the network for one pair of points.

  Args:
    gram: Gram matrix S_1 of all tokens, [d, d].
    x: token whose output is measured, [d].
    weights: (values, scores) of the network.
    residual: True if every layer adds its input.
    channel: channel of the output.
  """
  values, scores = weights
  depth, heads, d, _ = scores.shape
  s, y = gram.copy(), x.copy().reshape(d, 1)
  left, t = np.empty((d, d), np.int64), np.empty((d, d), np.int64)
  for layer in range(depth - 1):
    # T = sum_h W_O W_V S W_K.T W_Q, plus I with a residual connection.
    t[:] = 0
    np.fill_diagonal(t, 1 if residual else 0)
    for head in range(heads):
      left[:] = 0
      _add_product(values[layer, head], s, left)
      _add_product(left, scores[layer, head], t)
    # y <- T y, S <- T S T.T.
    y = _apply(t, y)
    left[:] = 0
    _add_product(t, s, left)
    s[:] = 0
    _add_product(left, t.T, s)
  # Compute only one channel of the last layer.
  total = y[channel, 0] if residual else 0
  for head in range(heads):
    # Apply the factors of T to y one by one, which is cheaper than T.
    z = _apply(s, _apply(scores[depth - 1, head], y))
    row = values[depth - 1, head, channel : channel + 1]
    total = _mod(total + _apply(row, z)[0, 0])
  return total


@numba.njit(parallel=True)
def _grid(
  gram_a: Any, gram_b: Any, x: Any, weights: Any, residual: Any, channel: Any
) -> Any:
  """Returns `_entry` for every pair of points, [points of a, points of b]."""
  rows, columns = len(gram_a), len(gram_b)
  y = np.empty((rows, columns), np.int64)
  for s in numba.prange(rows):
    for t in range(columns):
      # Gram matrices add up over the tokens.
      gram = (gram_a[s] + gram_b[t]) % PRIME
      y[s, t] = _entry(gram, x[s, t], weights, residual, channel)
  return y


def modular_rank(matrix: np.ndarray) -> int:
  """Returns the rank of an integer matrix [m, n] modulo p, by elimination."""
  m = np.ascontiguousarray(matrix % PRIME, np.int64)
  rank = 0
  for column in range(m.shape[1]):
    # Find the first row that has an entry in this column.
    nonzero = np.flatnonzero(m[rank:, column])
    if nonzero.size:
      # Swap it to the top, and eliminate the column from the rows below.
      pivot = rank + nonzero[0]
      m[[rank, pivot]] = m[[pivot, rank]]
      _eliminate(m, rank, column, pow(int(m[rank, column]), -1, PRIME))
      rank += 1
  return rank


@numba.njit(parallel=True)
def _eliminate(m: Any, top: Any, column: Any, inverse: Any) -> None:
  """Subtracts multiples of row `top` that clear a column below it.

  Args:
    m: matrix modulo p, changed in place.
    top: index of the pivot row.
    column: first column that is not eliminated yet.
    inverse: 1 / m[top, column] modulo p.
  """
  for row in numba.prange(top + 1, len(m)):
    factor = PRIME - _mod(m[row, column] * inverse)
    # A factor of p means 0: the column is clear already.
    if factor < PRIME:
      for k in range(column, m.shape[1]):
        m[row, k] = _mod(m[row, k] + factor * m[top, k])


def measure_rank(
  setting: Setting, seed: int = 0, max_points: int = 2_048
) -> Rank:
  """Returns the exact separation rank of a network with random weights.

  Args:
    setting: network, partition and entry of the output.
    seed: seed of weights and points.
    max_points: largest number of points of each group. The time grows with the
      cube of this number.

  Raises:
    UserError: for fewer than two points.
  """
  if max_points < 2:
    raise UserError(f"max_points={max_points} is below 2: give 2 or more.")
  weights = draw_weights(setting, seed)
  # Use the closed form only to choose the size of the first grid.
  points = min((closed_form(setting) or _FIRST_RANK) + 8, max_points)
  # Double the number of points until it exceeds the rank.
  while True:
    matrix = grid(setting, weights, *draw_tokens(setting, points, seed))
    rank = modular_rank(matrix)
    if rank < points or points == max_points:
      return Rank(rank, rank < points, points)
    points = min(2 * points, max_points)


def closed_form(setting: Setting) -> int | None:
  """Returns the separation rank by a formula, or None if no formula applies.

  For balanced partitions, with binom(n, k) the binomial coefficient:

    one layer: d + 1.
    two tokens, one head: binom(d + C, C) with C = (3^L - 1) / 2.
    two layers, one head, more tokens: binom(d + 4, 4) + d^2 (d^2 - 1) / 12
      + d (d^2 - 1) / 3.

  The first two formulas follow from the form of the network. The third was
  fitted to d = 2, 3, 4 and confirmed at d = 5, 6. For inputs of rank r, the
  formulas hold with r instead of d.
  """
  first, second = setting.groups
  if len(first) != len(second):
    return None
  d = setting.input_rank or setting.d_model
  if setting.num_layers == 1:
    return d + 1
  if setting.num_heads > 1:
    return None
  if setting.num_tokens == 2:
    # The rank is the number of monomials of degree up to C in d variables.
    c = bounds.degree(setting.num_layers)
    return math.comb(d + c, c)
  if setting.num_layers == 2:
    more = d * d * (d * d - 1) // 12 + d * (d * d - 1) // 3
    return math.comb(d + 4, 4) + more
  return None


TITLES = (
  "L",
  "d",
  "H",
  "N",
  "rank",
  "closed form",
  "log_3 rank",
  "bounds of log_3",
)


def rank_table(settings: Sequence[Setting], max_points: int, seed: int) -> str:
  """Returns a Markdown table of ranks, closed forms and bounds.

  Args:
    settings: networks and partitions to measure.
    max_points, seed: arguments of `measure_rank`.
  """
  rows = []
  for s in settings:
    result = measure_rank(s, seed, max_points)
    # Mark ranks that are lower bounds.
    sign = "" if result.exact else ">= "
    sizes = (s.num_layers, s.d_model, s.num_heads, s.num_tokens)
    log = f"{bounds.log3(result.rank):.2f}"
    rank = f"{sign}{result.rank:,}"
    rows.append((*sizes, rank, closed_form(s) or "", log, _format_bounds(s)))
  return markdown_table(TITLES, rows)


def _format_bounds(setting: Setting) -> str:
  """Returns the theorem that applies and its bounds, or "" if none applies.

  The theorems need balanced partitions, fewer heads than channels, and tokens
  that are not confined to a subspace.
  """
  s = setting
  first, second = s.groups
  is_full = s.input_rank in (0, s.d_model)
  if s.num_heads >= s.d_model or len(first) != len(second) or not is_full:
    return ""
  # Choose the theorem by the regime of the network.
  low, high, theorem = bounds.bounds(s.num_layers, s.d_model, s.num_heads)
  return f"theorem {theorem}: {low:.2f} to {high:.2f}"
