"""Empirical fit of width to depth, and comparisons of networks with the fit.

Source: the later version of Levine et al., "The Depth-to-Width Interplay in
Self-Attention" (https://arxiv.org/abs/2006.12467). Its trained decoders of 6 to
48 layers make good use of L layers if their width is at least d, where
log d = 5.039 + 0.0555 L. A network has 12 L d^2 parameters without embedding.
"""

from __future__ import annotations

import math

from jaxformers.foundations.errors import UserError

# The fit is the line log d = INTERCEPT + SLOPE L, with the natural logarithm.
INTERCEPT, SLOPE = 5.039, 0.0555
FITTED = (6, 48)  # Smallest and largest number of layers in the fit.
DEEPEST = 2 * FITTED[1]  # Largest number of layers that is recommended.
EXTRAPOLATED = "(beyond the {} to {} layers of the fit)".format(*FITTED)
VERDICTS = {
  "deep": "too deep for its width: fewer, wider layers would do better",
  "wide": "wide: more layers would be used",
  "balanced": "near the fit",
}


def width(num_layers: float) -> float:
  """Returns the width of the fit for L layers, exp(5.039 + 0.0555 L)."""
  return math.exp(INTERCEPT + SLOPE * num_layers)


def depth(d_model: float) -> float:
  """Returns the depth of the fit for a width d, the inverse of `width`.

  The depth is below 1 for d < 163, where the fit does not apply.
  """
  return (math.log(d_model) - INTERCEPT) / SLOPE


def parameters(num_layers: float, d_model: float) -> float:
  """Returns 12 L d^2: a layer has 4 d^2 of attention, 8 d^2 of feed-forward."""
  return 12 * num_layers * d_model**2


def depth_of(params: float) -> float:
  """Returns the depth of the fit for a number of parameters, by bisection.

  Raises:
    UserError: for fewer parameters than one layer of the fit has, or more than
      5,000 layers of the fit have.
  """
  if not math.isfinite(params):
    raise UserError(f"params={params}: give a number such as 125e6.")
  # Bracket the depth; the number of parameters grows with the depth.
  low, high = 1.0, 5_000.0
  least, most = (parameters(x, width(x)) for x in (low, high))
  if params < least:
    raise UserError(
      f"params={params:,.0f}: one layer of the fit has {least:,.0f} "
      "parameters without embedding. Give that many or more."
    )
  if params > most:
    raise UserError(
      f"params={params:.1e} is more than 5,000 layers of the fit have: give "
      f"{most:.1e} or less."
    )
  # Halve the bracket until its ends are adjacent in float64.
  for _ in range(80):
    middle = (low + high) / 2
    is_below = parameters(middle, width(middle)) < params
    low, high = (middle, high) if is_below else (low, middle)
  return (low + high) / 2


def place(num_layers: int, d_model: int) -> tuple[str, float]:
  """Compares a network with the fit.

  Args:
    num_layers, d_model: sizes of the network.

  Returns:
    The verdict, and the ratio d / d* to the width d* of the fit at this depth.
    The verdict is "deep" if the ratio is below 3/4 (layers are wasted), "wide"
    if the ratio is above 4/3 (more layers would help), and "balanced" between.
  """
  # Divide by a difference of logarithms, which does not overflow.
  share = math.exp(math.log(d_model) - INTERCEPT - SLOPE * num_layers)
  if share < 3 / 4:
    return "deep", share
  return ("wide" if share > 4 / 3 else "balanced"), share


def explain_thresholds(d_model: int, log3_d: float) -> list[str]:
  """Returns the lines of a report on the depth that suits a width.

  Args:
    d_model: width of the network.
    log3_d: threshold of the theory, log_3 d.
  """
  layers = depth(d_model)
  # Indent continued lines to the column of the values.
  indent = 21 * " "
  basis = "measured" if FITTED[0] <= layers <= FITTED[1] else "extrapolated"
  fitted = [
    f"  fit's threshold    {layers:.1f} layers, {basis}: trained networks of",
    indent + f"{d_model:,} channels make good use of them",
  ]
  if layers < 1:
    fitted = ["  fit's threshold    none: the fit begins at 163 channels"]
  return [
    f"  theory's threshold log_3 d = {log3_d:.2f} layers: the bounds favour "
    "depth up to it,",
    indent + "and neither depth nor width beyond it",
    *fitted,
    "  why they differ    log d grows with L by log 3 = 1.10 per layer in the "
    "theory,",
    indent + "which leaves out softmax, ReLU and layer norm, and by",
    indent + f"{SLOPE} in training: choose sizes by the fit",
  ]
