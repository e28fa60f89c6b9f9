"""Bounds of the separation rank, and what they say of depth and width.

Source: Levine et al. 2020, "Limits to Depth Efficiencies of Self-Attention",
https://arxiv.org/abs/2006.12467, theorems 1 and 2 and their corollaries. All
ranks are log_3: nothing overflows at L = 96 and d = 12,288. Two things stand
here otherwise than in the paper as it was first printed: the constant c_2 of
theorem 2, which is garbled there, is -2 d log_3(d / (2 sqrt(2 e))) + log_3 d
(so that the two upper bounds meet at L = log_3 d); and its example of corollary
1, see `width_needed`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LOG3 = math.log(3)


class Bounds(NamedTuple):
  """Of log_3 of the separation rank.

  Attributes:
    lower: may be negative, and then says nothing, for a rank is at least 1.
    upper: not below `lower`.
    theorem: 1 below the threshold log_3 d, 2 above.
  """

  lower: float
  upper: float
  theorem: int


def log3(x: float) -> float:
  """The logarithm to the base 3 of a positive number."""
  return math.log(x) / LOG3


def threshold(d_model: int) -> float:
  """log_3 d, the depth up to which the first regime lasts."""
  if d_model < 2:
    raise ValueError(f"d_model={d_model}: there are at least two channels.")
  return log3(d_model)


def degree(num_layers: int) -> int:
  """C = (3^L - 1) / 2: 1, 4, 13, 40, ... The output is P(S) x, P of degree C.

  S is the Gram matrix of the input; in its entries the output has the degree
  2 C + 1 = 3^L.
  """
  if num_layers < 1:
    raise ValueError(f"num_layers={num_layers}: there is at least one layer.")
  return (3**num_layers - 1) // 2


def bounds(num_layers: int, d_model: int, num_heads: int) -> Bounds:
  """Those of theorem 1 for L <= log_3 d, of theorem 2 for deeper networks.

  Args:
    num_layers: L.
    d_model: d.
    num_heads: H, less than d.

  Raises:
    ValueError: for sizes that no such network has.
  """
  _check(num_layers, d_model, num_heads)
  if num_layers <= _floor(d_model):
    return theorem_1(num_layers, d_model, num_heads)
  return theorem_2(num_layers, d_model, num_heads)


def theorem_1(num_layers: int, d_model: int, num_heads: int) -> Bounds:
  """Double exponential in depth: valid for L <= log_3 d (equation 6).

  Raises:
    ValueError: for deeper networks, of which `highest` alone holds.
  """
  _check(num_layers, d_model, num_heads)
  depth, d, heads = num_layers, d_model, num_heads
  if depth > _floor(d):
    raise ValueError(
      f"num_layers={depth} is above log_3 d = {threshold(d):.2f}: theorem 1 "
      "does not hold there; `theorem_2` does, and of theorem 1 `highest`."
    )
  lower = 3.0 ** (depth - 2) * (log3(d - heads) - depth + 2 - log3(2))
  return Bounds(lower, highest(depth, d, heads), 1)


def highest(num_layers: int, d_model: int, num_heads: int) -> float:
  """Theorem 1's upper bound, (3^L - 1) / 2 log_3(d + H), at any depth.

  The degree of the polynomial; infinite where float64 has no such number.
  """
  if num_heads < 1 or d_model < 1:
    raise ValueError(
      f"num_heads={num_heads}, d_model={d_model}: at least one of each."
    )
  if num_layers > 600:
    return math.inf
  return degree(num_layers) * log3(d_model + num_heads)


def theorem_2(num_layers: int, d_model: int, num_heads: int) -> Bounds:
  """Exponential in depth times width: valid for L >= log_3 d (equation 8).

  The lower bound is vacuous for a few layers above the threshold: d = 1000 and
  H = 16 up to L = 7.

  Raises:
    ValueError: for shallower networks.
  """
  _check(num_layers, d_model, num_heads)
  depth, d, heads = num_layers, d_model, num_heads
  if 3**depth < d:
    raise ValueError(
      f"num_layers={depth} is below log_3 d = {threshold(d):.2f}: theorem 2 "
      "does not hold there; `theorem_1` does."
    )
  b1 = -depth * (heads / 2 + 1)
  b2 = -d * (1 + log3((d - heads) / 2) / 2)
  c1 = depth
  c2 = -2 * d * log3(d / (2 * math.sqrt(2 * math.e))) + log3(d)
  return Bounds(d * depth / 2 + b1 + b2, 2 * d * depth + c1 + c2, 2)


class Width(NamedTuple):
  """How wide a shallower network has to be to do what a deeper one does.

  Attributes:
    log10: of the width.
    advantage: whether that is more than the deeper network's.
  """

  log10: float
  advantage: bool


def width_needed(
  shallow: int, num_layers: int, d_model: int, num_heads: int
) -> Width:
  """Corollary 1 in numbers: the least width, by the two bounds of theorem 1.

  A network of depth L_s can have the rank of the deeper one only if
  (3^L_s - 1) / 2 log_3(w + H) is at least the deeper one's lower bound. For
  L = 6, d = 1000, H = 16 that is w = 7.3e15 at L_s = 2 and 7.6e4 at 3. The
  paper prints 2e17 and 2e5, which its own formulas do not give; both fit a
  lower bound of 144 to 146 and not 133. From L_s = 4 on w is below d: there the
  bounds prove nothing for depth.

  Args:
    shallow: L_s, below num_layers.
    num_layers, d_model, num_heads: of the deeper network, L < log_3 d.

  Raises:
    ValueError: for depths outside the regime.
  """
  _check(shallow, d_model, num_heads)
  deep = bounds(num_layers, d_model, num_heads)
  if deep.theorem != 1 or not shallow < num_layers:
    raise ValueError(
      f"shallow={shallow}, num_layers={num_layers}: corollary 1 compares a "
      "network with a deeper one of fewer layers than log_3 d = "
      f"{threshold(d_model):.2f}."
    )
  exponent = deep.lower / degree(shallow) * LOG3
  # log(e^x - H), which e^x alone is where x is large.
  log = exponent
  if exponent < 600:
    wide = math.exp(exponent) - num_heads
    log = math.log(wide) if wide > 0 else -math.inf
  log10 = log / math.log(10)
  return Width(log10, log10 > math.log10(d_model))


class Surpassing(NamedTuple):
  """A shallower network of higher separation rank.

  Attributes:
    num_layers, log3_width: of it.
    beta: L_s = floor(log_3 d) + beta, width 3^beta d.
  """

  num_layers: int
  log3_width: float
  beta: int


def surpassing(num_layers: int, d_model: int, num_heads: int) -> Surpassing:
  """Corollary 2 in numbers: the least beta that the bounds allow.

  Beyond log_3 d layers a network of floor(log_3 d) + beta layers and 3^beta d
  channels has a higher rank: its lower bound (theorem 1's, for it is within its
  own first regime) is above the deeper one's upper bound.

  Args:
    num_layers, d_model, num_heads: of the deeper network, L > log_3 d. The
      other has as many heads.

  Raises:
    ValueError: below the threshold, or where there is none that is shallower.
  """
  deep = bounds(num_layers, d_model, num_heads)
  if deep.theorem != 2:
    raise ValueError(
      f"num_layers={num_layers}: corollary 2 is of networks deeper than "
      f"log_3 d = {threshold(d_model):.2f}."
    )
  first = _floor(d_model)
  for beta in range(num_layers - first):
    depth, log_width = first + beta, log3(d_model) + beta
    heads = log3(1 - num_heads / d_model * 3.0**-beta)
    inside = log_width + heads - depth + 2 - log3(2)
    lower = 3.0 ** min(depth - 2, 600) * inside
    if lower > deep.upper:
      return Surpassing(depth, log_width, beta)
  raise ValueError(
    f"num_layers={num_layers}, d_model={d_model}: the bounds show no shallower "
    "network of higher rank. It takes some layers above log_3 d."
  )


def _floor(d_model: int) -> int:
  """floor(log_3 d), by integers: 3^5 has a logarithm of 4.999..."""
  depth = 0
  while 3 ** (depth + 1) <= d_model:
    depth += 1
  return depth


def _check(num_layers: int, d_model: int, num_heads: int) -> None:
  if num_layers < 1:
    raise ValueError(f"num_layers={num_layers}: there is at least one layer.")
  # Whether H divides d plays no part in them: the paper's own example has 1000
  # channels and 16 heads.
  if num_heads < 1 or d_model - num_heads <= 0:
    raise ValueError(
      f"num_heads={num_heads} with d_model={d_model}: the bounds have "
      "log_3(d - H), so there is at least one head, and fewer than channels."
    )
