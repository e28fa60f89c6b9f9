r"""The separation rank of linearised self-attention, measured exactly.

python -m jaxformers rank --num_layers 1,2 --d_model 2,3,4 --num_heads 1

A function of two groups of tokens has the separation rank of its grid matrix
[y(a_s, b_t)] at generic points, once there are more points than the rank. With
weights and tokens drawn from the integers modulo p = 2^31 - 1 all of it is
exact: the rank over the rationals differs with a probability of about degree
times rank over p (Schwartz and Zippel). Floating point finds the same up to two
layers; at three it cuts the spectrum where there is no gap, see `numerical`.

The network is equation 3 of Levine et al. 2020 (arXiv 2006.12467) in its
compact form: with the Gram matrix S_1 of the tokens,
T_l = sum_h W_O W_V S_l W_K.T W_Q, y_l = T_l y_(l-1), S_(l+1) = T_l S_l T_l.T;
under a residual connection T_l + I stands for T_l.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from jaxformers import cli
from jaxformers.errors import UserError
from jaxformers.tables import markdown_table
from jaxformers.theory import bounds

PRIME = 2**31 - 1
_FIRST = 24  # Points of the first grid, less 8; then twice as many.


class Weights(NamedTuple):
  """Of a network of L layers and H heads, [l, h, d, d] each.

  Attributes:
    into: W_O W_V.
    of: W_K.T W_Q.
  """

  into: np.ndarray
  of: np.ndarray


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is measured.

  Attributes:
    num_layers: L.
    d_model: d.
    num_heads: H, a divisor of d.
    num_tokens: N.
    residual: whether every layer adds its input.
    input_rank: r of the subspace that tokens lie in, as of a vocabulary or an
      embedding of rank r; 0 for d.
    part: the tokens of the first group; () for the first half of them.
    position: i, the token whose output is looked at.
    channel: p, which of its channels.

  Raises:
    UserError: for what cannot be, with the reason.
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
    n, d = self.num_tokens, self.d_model
    if self.num_layers < 1:
      raise UserError(
        f"num_layers={self.num_layers}: there is at least one layer."
      )
    if d < 1 or self.num_heads < 1 or d % self.num_heads:
      raise UserError(
        f"num_heads={self.num_heads} does not divide d_model={d}: choose a "
        "number of heads that does."
      )
    if n < 2:
      raise UserError(f"num_tokens={n}: two groups have at least two tokens.")
    if not self.part and n % 2:
      raise UserError(
        f"num_tokens={n} is odd: there is no balanced partition. Choose an "
        "even number, or give `part`."
      )
    inside = {*self.part} <= {*range(n)} and len({*self.part}) == len(self.part)
    if not inside or len(self.part) == n:
      raise UserError(
        f"part={self.part}: distinct tokens of 0 to {n - 1}, and not all."
      )
    for name, most in (("position", n), ("channel", d)):
      if not 0 <= getattr(self, name) < most:
        raise UserError(
          f"{name}={getattr(self, name)} is not in 0 to {most - 1}."
        )
    if not 0 <= self.input_rank <= d:
      raise UserError(
        f"input_rank={self.input_rank} is not in 0 to d_model={d}."
      )

  @property
  def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of both groups."""
    first = self.part or tuple(range(self.num_tokens // 2))
    return first, tuple(k for k in range(self.num_tokens) if k not in first)


class Rank(NamedTuple):
  """A measured separation rank.

  Attributes:
    rank: of the grid matrix.
    exact: whether there were more points than that; else it is a lower bound.
    points: of each group.
  """

  rank: int
  exact: bool
  points: int


def draw_weights(setting: Setting, seed: int) -> Weights:
  """Uniform weights modulo p, int64."""
  rng = np.random.default_rng([seed, 0])
  s = setting
  width = s.d_model // s.num_heads
  shape = (s.num_layers, s.num_heads)
  q, k, v = (
    rng.integers(0, PRIME, (*shape, width, s.d_model)) for _ in range(3)
  )
  o = rng.integers(0, PRIME, (*shape, s.d_model, width))
  return Weights(_product(o, v), _product(k.swapaxes(-1, -2), q))


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Matrix products modulo p, term by term so that nothing overflows."""
  total = np.zeros((*a.shape[:-1], b.shape[-1]), np.int64)
  for k in range(a.shape[-1]):
    total = (total + a[..., :, k, None] * b[..., None, k, :]) % PRIME
  return total


def draw_tokens(
  setting: Setting, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Values of the tokens of both groups, int64 [count, tokens, d] modulo p.

  More points begin with fewer: the first rows do not depend on `count`.
  """
  d, r = setting.d_model, setting.input_rank or setting.d_model
  basis = np.random.default_rng([seed, 1]).integers(0, PRIME, (r, d))
  found = []
  for number, group in enumerate(setting.groups):
    rng = np.random.default_rng([seed, 2 + number])
    x = rng.integers(0, PRIME, (count, len(group), r))
    found.append(_product(x, basis) if setting.input_rank else x)
  return found[0], found[1]


def _prepared(
  setting: Setting, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
  """Gram matrices of both groups, and the token that is looked at."""
  first, second = setting.groups
  mine = setting.position in first
  own, group = (a, first) if mine else (b, second)
  x = own[:, group.index(setting.position)]
  return _product(a.swapaxes(1, 2), a), _product(b.swapaxes(1, 2), b), x, mine


def grid(
  setting: Setting, weights: Weights, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
  """y of every pair of points, modulo p -> int64 [points of a, points of b].

  Args:
    setting: of which position, channel and residual are read.
    weights: modulo p.
    a, b: the tokens of both groups, int64 [points, tokens, d] modulo p.
  """
  gram_a, gram_b, x, mine = _prepared(setting, a, b)
  return _grid(
    gram_a,
    gram_b,
    x,
    mine,
    weights.into,
    weights.of,
    setting.residual,
    setting.channel,
  )


@numba.njit(nogil=True, inline="always")
def _reduced(x: Any) -> Any:
  """x modulo 2^31 - 1 without a division, for 0 <= x < 2^63."""
  x = (x & PRIME) + (x >> 31)
  x = (x & PRIME) + (x >> 31)
  return x - PRIME if x >= PRIME else x


@numba.njit(nogil=True)
def _times(a: Any, b: Any, out: Any) -> None:
  d = len(a)
  for i in range(d):
    for j in range(d):
      total = 0
      for k in range(d):
        total = _reduced(total + a[i, k] * b[k, j])
      out[i, j] = total


@numba.njit(nogil=True)
def _onto(a: Any, x: Any) -> Any:
  found = np.zeros(len(a), np.int64)
  for i in range(len(a)):
    for j in range(len(x)):
      found[i] = _reduced(found[i] + a[i, j] * x[j])
  return found


@numba.njit(nogil=True)
def _output(
  gram: Any, x: Any, into: Any, of: Any, residual: Any, channel: Any
) -> Any:
  depth, heads, d = of.shape[0], of.shape[1], of.shape[2]
  s, y = gram.copy(), x.copy()
  one, two = np.empty((d, d), np.int64), np.empty((d, d), np.int64)
  for layer in range(depth - 1):
    t = np.zeros((d, d), np.int64)
    for head in range(heads):
      _times(into[layer, head], s, one)
      _times(one, of[layer, head], two)
      for i in range(d):
        for j in range(d):
          t[i, j] = _reduced(t[i, j] + two[i, j])
    if residual:
      for i in range(d):
        t[i, i] = _reduced(t[i, i] + 1)
    y = _onto(t, y)
    _times(t, s, one)
    _times(one, t.T, s)
  # Of the last layer one channel is looked at.
  total = y[channel] if residual else 0
  for head in range(heads):
    seen = _onto(s, _onto(of[depth - 1, head], y))
    for j in range(d):
      total = _reduced(total + into[depth - 1, head, channel, j] * seen[j])
  return total


@numba.njit(parallel=True)
def _grid(
  gram_a: Any,
  gram_b: Any,
  x: Any,
  mine: Any,
  into: Any,
  of: Any,
  residual: Any,
  channel: Any,
) -> Any:
  rows, columns = len(gram_a), len(gram_b)
  found = np.empty((rows, columns), np.int64)
  for s in numba.prange(rows):
    for t in range(columns):
      gram = (gram_a[s] + gram_b[t]) % PRIME
      own = x[s] if mine else x[t]
      found[s, t] = _output(gram, own, into, of, residual, channel)
  return found


def modular_rank(matrix: np.ndarray) -> int:
  """The rank of an integer matrix modulo p, by elimination.

  Args:
    matrix: integers [m, n].
  """
  return int(_eliminate(np.ascontiguousarray(matrix % PRIME, np.int64)))


@numba.njit(nogil=True)
def _inverse(a: Any) -> Any:
  """a^(p - 2), which is 1 / a modulo p."""
  result, exponent = 1, PRIME - 2
  while exponent:
    if exponent & 1:
      result = result * a % PRIME
    a = a * a % PRIME
    exponent >>= 1
  return result


@numba.njit(parallel=True)
def _eliminate(m: Any) -> Any:
  rows, columns = m.shape
  rank = 0
  for column in range(columns):
    pivot = -1
    for row in range(rank, rows):
      if m[row, column]:
        pivot = row
        break
    if pivot < 0:
      continue
    for k in range(column, columns):
      m[rank, k], m[pivot, k] = m[pivot, k], m[rank, k]
    scale = _inverse(m[rank, column])
    for row in numba.prange(rank + 1, rows):
      factor = PRIME - _reduced(m[row, column] * scale)
      if factor < PRIME:
        for k in range(column, columns):
          m[row, k] = _reduced(m[row, k] + factor * m[rank, k])
    rank += 1
    if rank == rows:
      break
  return rank


def measure(setting: Setting, seed: int = 0, max_points: int = 2_048) -> Rank:
  """The separation rank at random weights, exactly.

  Args:
    setting: what is measured.
    seed: of weights and points.
    max_points: of each group, at most; time grows with its cube.

  Raises:
    UserError: for fewer than two points.
  """
  if max_points < 2:
    raise UserError(f"max_points={max_points}: it takes at least two.")
  weights = draw_weights(setting, seed)
  # A formula, where there is one, only says how many points to begin with.
  points = min((closed_form(setting) or _FIRST) + 8, max_points)
  while True:
    matrix = grid(setting, weights, *draw_tokens(setting, points, seed))
    rank = modular_rank(matrix)
    if rank < points or points == max_points:
      return Rank(rank, rank < points, points)
    points = min(2 * points, max_points)


def numerical(
  setting: Setting, points: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """The grid in float64 at normal weights, and its singular values.

  How many of these are above 1e-10 of the largest is the rank for L <= 2. At
  L = 3 there is no gap: d = 2 and N = 4 have the rank 232, and over three seeds
  23 to 48 singular values above 1e-8, 40 to 69 above 1e-10, 66 to 96 above
  1e-12.

  Returns:
    float64 [points, points], and [points] relative to the largest.
  """
  s = setting
  rng = np.random.default_rng([seed, 9])
  width = s.d_model // s.num_heads
  shape = (s.num_layers, s.num_heads)
  q, k, v = (rng.normal(size=(*shape, width, s.d_model)) for _ in range(3))
  o = rng.normal(size=(*shape, s.d_model, width))
  into, of = o @ v, k.swapaxes(-1, -2) @ q
  r = s.input_rank or s.d_model
  basis = rng.normal(size=(r, s.d_model)) if s.input_rank else np.eye(r)
  a, b = (rng.normal(size=(points, len(g), r)) @ basis for g in s.groups)
  first, second = s.groups
  mine = s.position in first
  own = a[:, first.index(s.position)] if mine else None
  y = own if mine else b[:, second.index(s.position)]
  y = y[:, None] if mine else y[None]
  gram = (a.swapaxes(1, 2) @ a)[:, None] + (b.swapaxes(1, 2) @ b)[None]
  y = np.broadcast_to(y, (points, points, s.d_model))
  for layer in range(s.num_layers):
    t = sum(into[layer, h] @ gram @ of[layer, h] for h in range(s.num_heads))
    if s.residual:
      t = t + np.eye(s.d_model)
    y = np.einsum("stij,stj->sti", t, y)
    gram = t @ gram @ t.swapaxes(-1, -2)
  matrix = y[..., s.channel]
  values = np.linalg.svd(matrix / np.abs(matrix).max(), compute_uv=False)
  return matrix, values / values[0]


def closed_form(setting: Setting) -> int | None:
  """The separation rank where a formula is known, for balanced partitions.

  d + 1 for one layer; C(d + C, C) with C = (3^L - 1) / 2 for two tokens and one
  head; C(d + 4, 4) + d^2 (d^2 - 1) / 12 + d (d^2 - 1) / 3 for two layers, one
  head and more tokens. The first two follow from the network's form; the third
  was found on d = 2, 3, 4 and confirmed at 5 and 6. With inputs of rank r, that
  of a network of width r. None for other settings.
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
    c = bounds.degree(setting.num_layers)
    return math.comb(d + c, c)
  if setting.num_layers == 2:
    more = d * d * (d * d - 1) // 12 + d * (d * d - 1) // 3
    return math.comb(d + 4, 4) + more
  return None


TITLES = (
  *("L", "d", "H", "N", "rank"),
  *("closed form", "log_3 rank", "bounds of log_3"),
)


def table(settings: Sequence[Setting], max_points: int, seed: int) -> str:
  """Ranks beside closed forms and the bounds that hold, in Markdown.

  Args:
    settings: networks and partitions to measure.
    max_points, seed: see `measure`.
  """
  rows = []
  for s in settings:
    result = measure(s, seed, max_points)
    cells = (
      *(s.num_layers, s.d_model, s.num_heads, s.num_tokens),
      f"{'' if result.exact else '>= '}{result.rank:,}",
      closed_form(s) or "",
      f"{bounds.log3(result.rank):.2f}",
      _format_bounds(s),
    )
    rows.append(cells)
  return markdown_table(TITLES, rows)


def _format_bounds(setting: Setting) -> str:
  """Returns the theorem that holds and its bounds; "" where neither does.

  The theorems are about balanced partitions, fewer heads than channels, and
  tokens that are not confined to a subspace.
  """
  s = setting
  first, second = s.groups
  full = s.input_rank in (0, s.d_model)
  if s.num_heads >= s.d_model or len(first) != len(second) or not full:
    return ""
  low, high, theorem = bounds.bounds(s.num_layers, s.d_model, s.num_heads)
  return f"theorem {theorem}: {low:.2f} to {high:.2f}"


@cli.command(
  cli.argument("--num_layers", default="2", help="depths L: 1,2"),
  cli.argument(
    "--d_model", default="2,3,4", help="widths d; 4 at L = 3 takes minutes"
  ),
  cli.argument("--num_heads", default="1", help="numbers H of heads"),
  cli.argument("--num_tokens", default="2", help="even numbers N of tokens"),
  cli.argument(
    "--input_rank",
    default=0,
    help="rank of the subspace of the tokens (default: d)",
  ),
  cli.switch("--residual", help="add its input to every layer"),
  cli.argument(
    "--part",
    default="",
    help="tokens of the first group: 0,2 (default: the first half)",
  ),
  cli.argument("--position", default=0, help="token whose output is looked at"),
  cli.argument("--max_points", default=2_048, help="largest side of a grid"),
  cli.argument("--seed", default=0, help="seed of the weights"),
)
def main(
  num_layers: str,
  d_model: str,
  num_heads: str,
  num_tokens: str,
  part: str,
  max_points: int,
  seed: int,
  **options: Any,
) -> None:
  """Prints the ranks of all combinations of sizes."""
  sizes = itertools.product(
    cli.numbers("num_layers", num_layers),
    cli.numbers("d_model", d_model),
    cli.numbers("num_heads", num_heads),
    cli.numbers("num_tokens", num_tokens),
  )
  group = tuple(cli.numbers("part", part))
  settings = [Setting(*each, part=group, **options) for each in sizes]
  print(table(settings, max_points, seed))


if __name__ == "__main__":
  main()
