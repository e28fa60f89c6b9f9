"""Bounds on log_3 of the separation rank of linearised self-attention.

Source: Levine et al. 2020, "Limits to Depth Efficiencies of Self-Attention",
https://arxiv.org/abs/2006.12467, theorems 1 and 2 and their corollaries.
Differs from the first printed version of the paper in two places. The constant
c_2 of theorem 2 is garbled there; here c_2 = -2 d log_3(d / (2 sqrt(2 e))) +
log_3 d, which makes the two upper bounds meet at L = log_3 d. The numbers of
the example of corollary 1 differ, see `width_needed`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxformers.foundations.errors import UserError
from jaxformers.theory import fit

LOG3 = math.log(3)
LARGEST = 10**9  # Greatest number of layers or channels of a report.


class Bounds(NamedTuple):
  """Bounds on log_3 of the separation rank.

  Attributes:
    lower: lower bound. A negative bound is vacuous, since a rank is at least 1.
    upper: upper bound, at least `lower`.
    theorem: number of the theorem: 1 up to the threshold log_3 d, 2 above.
  """

  lower: float
  upper: float
  theorem: int


def log3(x: float) -> float:
  """Returns the logarithm to the base 3 of a positive number."""
  return math.log(x) / LOG3


def threshold(d_model: int) -> float:
  """Returns log_3 d, the greatest depth of the depth-efficient regime."""
  if d_model < 2:
    raise UserError(f"d_model={d_model} is below 2: give 2 or more channels.")
  return log3(d_model)


def degree(num_layers: int) -> int:
  """Returns C = (3^L - 1) / 2: 1, 4, 13, 40, ...

  The output of the network is P(S) x, where P is a polynomial of degree C and
  S is the Gram matrix of the input. As a polynomial of the entries of the
  input, the output has degree 2 C + 1 = 3^L.
  """
  check_layers(num_layers)
  return (3**num_layers - 1) // 2


def bounds(num_layers: int, d_model: int, num_heads: int) -> Bounds:
  """Returns the bounds of theorem 1 if L <= log_3 d, or of theorem 2 if not.

  The theorems state L < log_3 d and L > log_3 d. As in the paper's
  introduction, L = log_3 d belongs to the first regime.

  Args:
    num_layers: depth L.
    d_model: width d.
    num_heads: number of heads H, less than d.

  Raises:
    UserError: for fewer than one layer or head, or H >= d.
  """
  # Compare integers: log_3 of a power of 3 may be rounded.
  theorem = theorem_1 if num_layers <= _floor(d_model) else theorem_2
  return theorem(num_layers, d_model, num_heads)


def theorem_1(num_layers: int, d_model: int, num_heads: int) -> Bounds:
  """Returns bounds double exponential in L, for L <= log_3 d (equation 7).

  Raises:
    UserError: for deeper networks; their only bound here is `highest`.
  """
  _check(num_layers, d_model, num_heads)
  depth, d, heads = num_layers, d_model, num_heads
  if depth > _floor(d):
    raise UserError(
      f"num_layers={depth} is above log_3 d = {threshold(d):.2f}, where "
      "theorem 1 does not hold: use `theorem_2`, or `highest` for theorem 1's "
      "upper bound."
    )
  lower = 3.0 ** (depth - 2) * (log3(d - heads) - depth + 2 - log3(2))
  return Bounds(lower, highest(depth, d, heads), 1)


def highest(num_layers: int, d_model: int, num_heads: int) -> float:
  """Returns theorem 1's upper bound (3^L - 1) / 2 log_3(d + H), for any depth.

  The bound follows from the degree of the polynomial; see `degree`. Returns
  infinity above 600 layers, where float64 would overflow.
  """
  if num_heads < 1 or d_model < 1:
    raise UserError(
      f"num_heads={num_heads}, d_model={d_model}: give 1 or more of each."
    )
  # 3^600 is near the greatest float64.
  if num_layers > 600:
    return math.inf
  return degree(num_layers) * log3(d_model + num_heads)


def theorem_2(num_layers: int, d_model: int, num_heads: int) -> Bounds:
  """Returns bounds exponential in L d, for L >= log_3 d (equation 8).

  The lower bound is negative for the first few depths above the threshold. For
  d = 1000 and H = 16 it is negative up to L = 7.

  Raises:
    UserError: for shallower networks.
  """
  _check(num_layers, d_model, num_heads)
  depth, d, heads = num_layers, d_model, num_heads
  # Compare integers: log_3 of a power of 3 may be rounded.
  if depth <= _floor(d) and 3**depth < d:
    raise UserError(
      f"num_layers={depth} is below log_3 d = {threshold(d):.2f}, where "
      "theorem 2 does not hold: use `theorem_1`."
    )
  # Name the constants as in equation 8.
  b1 = -depth * (heads / 2 + 1)
  b2 = -d * (1 + log3((d - heads) / 2) / 2)
  c1 = depth
  c2 = -2 * d * log3(d / (2 * math.sqrt(2 * math.e))) + log3(d)
  return Bounds(d * depth / 2 + b1 + b2, 2 * d * depth + c1 + c2, 2)


class Width(NamedTuple):
  """Width that a shallower network needs to reach the rank of a deeper one.

  Attributes:
    log10: logarithm of the width to the base 10.
    advantage: True if this width is above the width of the deeper network.
  """

  log10: float
  advantage: bool


def width_needed(
  shallow: int, num_layers: int, d_model: int, num_heads: int
) -> Width:
  """Returns the least width w of corollary 1, from both bounds of theorem 1.

  A network of depth L_s can reach the rank of the deeper network only if its
  upper bound (3^L_s - 1) / 2 log_3(w + H) reaches the lower bound of the deeper
  network. For L = 6, d = 1000, H = 16 the least w is 7.3e15 at L_s = 2 and
  7.6e4 at L_s = 3. From L_s = 4 on, w is below d, and the bounds prove no
  advantage of depth.

  Differs from the paper's example, which prints 2e17 and 2e5. These widths
  follow from a lower bound of 144 to 146, but the paper's formulas give 133.

  Args:
    shallow: depth L_s of the shallower network, below num_layers.
    num_layers, d_model, num_heads: sizes of the deeper network, L <= log_3 d.

  Raises:
    UserError: for depths outside the regime.
  """
  _check(shallow, d_model, num_heads)
  deep = bounds(num_layers, d_model, num_heads)
  if deep.theorem != 1 or not shallow < num_layers:
    raise UserError(
      f"shallow={shallow}, num_layers={num_layers}: corollary 1 needs "
      "shallow < num_layers <= log_3 d = "
      f"{threshold(d_model):.2f}. Give depths in that range."
    )
  # Set the shallow network's upper bound equal to the lower bound.
  exponent = deep.lower / degree(shallow) * LOG3
  # Solve for log w = log(e^x - H). For large x, e^x overflows and H is
  # negligible.
  log = exponent
  if exponent < 600:
    wide = math.exp(exponent) - num_heads
    log = math.log(wide) if wide > 0 else -math.inf
  log10 = log / math.log(10)
  return Width(log10, log10 > math.log10(d_model))


class Surpassing(NamedTuple):
  """Sizes of a shallower network with a higher separation rank.

  Attributes:
    num_layers: depth, floor(log_3 d) + beta.
    log3_width: log_3 of the width 3^beta d.
    beta: number of layers above floor(log_3 d).
  """

  num_layers: int
  log3_width: float
  beta: int


def surpassing(num_layers: int, d_model: int, num_heads: int) -> Surpassing:
  """Returns the network of corollary 2 with the least beta that is proven.

  A network of floor(log_3 d) + beta layers and 3^beta d channels lies in its
  depth-efficient regime. This shallower network has a higher rank than the
  deeper one if its lower bound (theorem 1) exceeds the upper bound of the
  deeper one. The least beta is log_3 L + O(1) for every d and H. This is within
  the order O(log H log d log L) of the corollary for two and more heads. For
  one head that order is 0, which the bounds do not prove.

  Args:
    num_layers, d_model, num_heads: sizes of the deeper network, L > log_3 d.
      The shallower network has the same number of heads.

  Raises:
    UserError: if L <= log_3 d, or if the bounds prove a higher rank for no
      shallower network.
  """
  deep = bounds(num_layers, d_model, num_heads)
  if deep.theorem != 2:
    raise UserError(
      f"num_layers={num_layers}: corollary 2 needs a network deeper than "
      f"log_3 d = {threshold(d_model):.2f}."
    )
  # Triple the width and add a layer until the lower bound is high enough.
  first = _floor(d_model)
  for beta in range(num_layers - first):
    depth, log_width = first + beta, log3(d_model) + beta
    # log_3(w - H) = log_3 w + log_3(1 - H / w) avoids the overflow of w.
    heads = log3(1 - num_heads / d_model * 3.0**-beta)
    inside = log_width + heads - depth + 2 - log3(2)
    lower = 3.0 ** min(depth - 2, 600) * inside
    if lower > deep.upper:
      return Surpassing(depth, log_width, beta)
  raise UserError(
    f"num_layers={num_layers}, d_model={d_model}: the bounds show no shallower "
    "network of higher rank. Give more layers."
  )


def _floor(d_model: int) -> int:
  """Returns floor(log_3 d) in integers, since float64 rounds log_3 3^5 down."""
  depth = 0
  while 3 ** (depth + 1) <= d_model:
    depth += 1
  return depth


def _check(num_layers: int, d_model: int, num_heads: int) -> None:
  """Raises UserError for sizes for which the bounds are not defined."""
  check_layers(num_layers)
  # H need not divide d: the paper's example has 1000 channels and 16 heads.
  if num_heads < 1 or d_model - num_heads <= 0:
    raise UserError(
      f"num_heads={num_heads} with d_model={d_model}: the bounds contain "
      "log_3(d - H), so give at least one head, and fewer heads than channels."
    )


def check_layers(num_layers: int) -> None:
  """Raises UserError for fewer layers than one."""
  if num_layers < 1:
    raise UserError(f"num_layers={num_layers} is below 1: give 1 or more.")


def bound_lines(num_layers: int, d_model: int, num_heads: int) -> list[str]:
  """Returns the lines of a report: the bounds of a network, and the fit.

  Args:
    num_layers, d_model, num_heads: sizes of the network; see `bounds`.

  Raises:
    UserError: for sizes that `bounds` rejects, or above 10^9.
  """
  for name, size in (("num_layers", num_layers), ("d_model", d_model)):
    if size > LARGEST:
      raise UserError(f"{name}={size}: give {LARGEST:,} or less.")
  lower, upper, theorem = bounds(num_layers, d_model, num_heads)
  regime, sign = ("efficient", "<=") if theorem == 1 else ("inefficient", ">")
  corollary = _corollary_1 if theorem == 1 else _corollary_2
  params = fit.parameters(num_layers, d_model)
  # Report the bounds and corollaries of the theory.
  lines = [
    f"L = {num_layers:,}, d = {d_model:,}, H = {num_heads:,}: "
    f"{params / 1e6:,.1f} M parameters without embedding",
    f"  regime             depth-{regime}: L = {num_layers:,} {sign} "
    f"log_3 d = {threshold(d_model):.2f}",
    f"  theorem {theorem}          {lower:,.1f} <= log_3 of the separation "
    f"rank <= {upper:,.1f}",
    *([f"{'':21}(a negative lower bound says nothing)"] if lower < 0 else []),
    *corollary(num_layers, d_model, num_heads),
    *fit.explain_thresholds(d_model, threshold(d_model)),
  ]
  # Compare with the network of the fit that has the same parameters.
  if params < fit.parameters(1, fit.width(1)):
    return [*lines, "  fit for this size  none: smaller than one layer of it"]
  depth = fit.depth_of(params)
  kind, share = fit.place(num_layers, d_model)
  first, last = fit.FITTED
  is_fitted = first <= num_layers <= last
  return [
    *lines,
    f"  fit for this size  L = {depth:.1f}, d = {fit.width(depth):,.0f}",
    f"  verdict            {share:.2f} times the fit's width at L = "
    f"{num_layers:,}:",
    f"{'':21}{fit.VERDICTS[kind]}",
    *([] if is_fitted else [f"{'':21}{fit.EXTRAPOLATED}"]),
  ]


def _corollary_1(num_layers: int, d_model: int, num_heads: int) -> list[str]:
  """Returns the widths that shallower networks need for the same rank."""
  lines = []
  for shallow in range(1, num_layers):
    log10, advantage = width_needed(shallow, num_layers, d_model, num_heads)
    # float64 ends at 1.8e308: print larger widths as a power of 10.
    width = f"{10**log10:.1e}" if log10 < 300 else f"10^{log10:,.0f}"
    result = f"{width} channels for this rank"
    if not advantage:
      result = "no more channels: nothing is proven"
    lines.append(f"at L = {shallow} it takes {result}")
    # Deeper networks need even less width, so stop here.
    if not advantage:
      break
  first, *others = lines or ["there is no shallower network"]
  return [f"  corollary 1        {first}", *(f"{'':21}{x}" for x in others)]


def _corollary_2(num_layers: int, d_model: int, num_heads: int) -> list[str]:
  """Returns the shallower network of higher rank, if the bounds show one."""
  try:
    # Compute the width 3^beta d exactly, as an integer.
    depth, _, beta = surpassing(num_layers, d_model, num_heads)
    higher = f"{depth} layers of {3**beta * d_model:,} channels have"
  except UserError:
    higher = "the bounds show no shallower network that has"
  return [f"  corollary 2        {higher} a higher rank"]
