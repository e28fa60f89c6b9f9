"""Recommended depth and width for a number of parameters.

Sources: the fit of Levine et al. (`theory.fit`), arXiv 2006.12467; the rank of
the embedding as a bottleneck, arXiv 2105.03928.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

from jaxformers.foundations import requirements
from jaxformers.foundations.errors import UserError
from jaxformers.theory import bounds, fit


@dataclasses.dataclass(frozen=True)
class Advice:
  """Recommended sizes of a network with a given number of parameters.

  Attributes:
    fit_depth, fit_width: number of layers and width of the fit, not rounded.
    num_layers, d_model: number of layers and width to build. The width is a
      multiple of the size of a head: 64, or 32 below a width of 512, or 16
      below 256.
    bottleneck: smallest of width, vocabulary and rank of the embedding.
    fitted: True if `num_layers` is within the depths that were fitted.
  """

  fit_depth: float
  fit_width: float
  num_layers: int
  d_model: int
  bottleneck: int
  fitted: bool


def advise(params: float, vocab: int = 0, rank: int = 0) -> Advice:
  """Recommends a depth and a width for a number of parameters.

  The recommended network has 12 L d^2 parameters. This number is within 5 % of
  `params` from 1e7 on, and within 10 % below. The vocabulary and the rank bound
  the width: if one of them is below the width of the fit, the network is
  narrower, and has more layers instead.

  Args:
    params: number of parameters, without the embedding.
    vocab: number of ids of the vocabulary; 0 for no bound.
    rank: rank of the embedding; 0 for no bound.

  Raises:
    UserError: if a bound is negative, if `params` is below one layer of the
      fit, or if the network would need more than 96 layers.
  """
  if vocab < 0 or rank < 0:
    raise UserError(f"vocab={vocab}, rank={rank}: give 0 (no bound) or more.")
  # Find the sizes of the fit.
  depth = fit.depth_of(params)
  fit_width = fit.width(depth)
  if depth > fit.DEEPEST:
    most = math.floor(fit.parameters(fit.DEEPEST, fit.width(fit.DEEPEST)))
    raise UserError(
      f"params={params:,.0f}: the fit has {depth:.0f} layers of "
      f"{fit_width:,.0f} channels for them. The advice ends at {fit.DEEPEST} "
      "layers, twice the deepest network of the fit. Give "
      f"--params {most} or less."
    )
  # Cut the width to the bottleneck, and round to whole heads and layers.
  limits = {"vocab": vocab or math.inf, "rank": rank or math.inf}
  name, narrowest = min(limits.items(), key=lambda item: item[1])
  sizes = _round_sizes(params, min(fit_width, narrowest), narrowest)
  # At this width, 96 layers may have too few parameters.
  if _is_off(params, sizes):
    raise UserError(_bottleneck_message(params, int(narrowest), name))
  bottleneck = int(min(sizes[1], narrowest))
  is_fitted = fit.FITTED[0] <= sizes[0] <= fit.FITTED[1]
  return Advice(depth, fit_width, *sizes, bottleneck, is_fitted)


def _head_width(d_model: float) -> int:
  """Returns the size of a head for a width."""
  return 64 if d_model >= 512 else 32 if d_model >= 256 else 16


def _round_width(d_model: float, widest: float) -> int:
  """Returns the nearest width of whole heads that is at most `widest`."""
  head = _head_width(d_model)
  # Round to whole heads; round down if the result is above `widest`.
  heads = max(round(d_model / head), 1)
  if heads * head > widest:
    heads = int(widest // head)
  # If not even one head fits, the width is `widest`.
  return heads * head or int(widest)


def _round_sizes(params: float, width: float, widest: float) -> tuple[int, int]:
  """Returns (num_layers, d_model) whose parameters come closest to `params`.

  The width is a multiple of the size of a head. Sizes that the fit calls
  balanced are preferred, if their parameters are within the tolerance.

  Args:
    params: number of parameters.
    width: width to round.
    widest: upper bound on the width.
  """
  # Candidate 1: round the width, and take the depth for that width.
  rounded = _round_width(width, widest)
  sizes = [(round(params / fit.parameters(1, rounded)), rounded)]
  # Candidates 2 and 3: round the depth down and up, each with its best width.
  depth = params / fit.parameters(1, width)
  for num_layers in (math.floor(depth), math.ceil(depth)):
    ideal = math.sqrt(params / fit.parameters(max(num_layers, 1), 1))
    sizes.append((num_layers, _round_width(ideal, widest)))

  def cost(pair: tuple[int, int]) -> tuple[bool, float]:
    is_second = _is_off(params, pair) or fit.place(*pair)[0] != "balanced"
    return is_second, abs(fit.parameters(*pair) / params - 1)

  # Keep between 1 and 96 layers.
  return min(((min(max(n, 1), fit.DEEPEST), d) for n, d in sizes), key=cost)


def _is_off(params: float, sizes: tuple[int, int]) -> bool:
  """Returns True if the parameters of a network are too far from `params`."""
  tolerance = 0.05 if params >= 1e7 else 0.1
  return abs(fit.parameters(*sizes) / params - 1) > tolerance


def _bottleneck_message(params: float, narrowest: int, name: str) -> str:
  """Returns the message for a bottleneck that needs more than 96 layers."""
  # Count the parameters of 96 layers as wide as the bottleneck.
  d_model = _round_width(narrowest, narrowest)
  most = fit.parameters(fit.DEEPEST, d_model)
  # Find the least width of whole heads for which 96 layers suffice.
  ideal = math.sqrt(params / fit.parameters(fit.DEEPEST, 1))
  least = math.ceil(ideal / _head_width(ideal)) * _head_width(ideal)
  remedy = f"--{name} {least} or more"
  if most >= fit.parameters(1, fit.width(1)):
    remedy += f", or --params {most} or less"
  return (
    f"params={params:,.0f}: {name}={narrowest:,} bounds the useful width to "
    f"{d_model:,}. At that width {fit.DEEPEST} layers, the largest number that "
    f"is recommended, have {most:,} parameters. Give {remedy}."
  )


class Sizes(NamedTuple):
  """Sizes of the config to compare.

  Attributes:
    num_layers, d_model: depth and width.
    mlp_dim: width of the feed-forward layer; 0 if the config has none.
  """

  num_layers: int
  d_model: int
  mlp_dim: int

  @property
  def parameters(self) -> float:
    """Number of weights of all layers, L (4 d^2 + 2 d mlp_dim).

    Without `mlp_dim`, the number is 12 L d^2, as in the fit.
    """
    if not self.mlp_dim:
      return fit.parameters(self.num_layers, self.d_model)
    d = self.d_model
    return self.num_layers * (4 * d * d + 2 * d * self.mlp_dim)


def advice_lines(
  params: float, vocab: int, rank: int, sizes: Sizes | None
) -> list[str]:
  """Returns the lines of text of the advice.

  Args:
    params, vocab, rank: number of parameters and bounds; see `advise`.
    sizes: sizes of the config to compare, or None.
  """
  advice = advise(params, vocab, rank)
  layers, d_model = advice.num_layers, advice.d_model
  built = fit.parameters(layers, d_model)
  lines = [
    f"{params:,.0f} parameters without embedding:",
    f"  the fit            L = {advice.fit_depth:.1f}, "
    f"d = {advice.fit_width:.0f}",
    f"  to build           {layers} layers of {d_model} channels, "
    f"{built / 1e6:,.1f} M parameters ({built / params - 1:+.1%})",
    *([] if advice.fitted else [f"{'':21}{fit.EXTRAPOLATED}"]),
    *fit.explain_thresholds(d_model, bounds.threshold(d_model)),
  ]
  # Name the bottleneck, the smaller bound; a bound of 0 means no bound.
  bottlenecks = {"vocabulary": vocab, "rank of the embedding": rank}
  bottlenecks = {name: n for name, n in bottlenecks.items() if n}
  if bottlenecks:
    name, least = min(bottlenecks.items(), key=lambda item: (item[1], item[0]))
    lines.append(f"  bottleneck         {name} {least:,}: ")
    if least < advice.fit_width:
      lines[-1] += f"below the fit's width, so depth instead: d = {d_model},"
      lines.append(f"{'':21}and more layers than the fit has for that width")
    else:
      lines[-1] += "above the width, no bound"
  return lines + (_compare(sizes, bottlenecks) if sizes else [])


def _compare(sizes: Sizes, bottlenecks: dict[str, int]) -> list[str]:
  """Returns the lines of text that compare a config with the advice."""
  depth, d_model = sizes.num_layers, sizes.d_model
  # Place the config by the fit at its depth.
  kind, share = fit.place(depth, d_model)
  # The fit counts feed-forward layers of width 4 d.
  is_usual = sizes.mlp_dim == 4 * d_model
  return [
    f"the config: {depth} layers of {d_model} channels, "
    f"{sizes.parameters / 1e6:,.1f} M parameters"
    + ("" if is_usual else " (its layers do not have 12 d^2 weights)"),
    f"  fit at that depth  d = {fit.width(depth):.0f}; it has {share:.2f} "
    f"times that: {fit.VERDICTS[kind]}",
    *(
      f"  bottleneck         {name} {n:,}, below its {d_model} channels: a "
      "wider one adds nothing"
      for name, n in bottlenecks.items()
      if n < d_model
    ),
  ]


def draw(path: Path, advice: Advice, sizes: Sizes | None) -> None:
  """Draws width over depth: the fit, the advice and the config.

  Args:
    path: file of the picture; its suffix gives the format.
    advice: result of `advise`.
    sizes: sizes of the config to compare, or None.
  """
  requirements.require("plots", f"The picture {path}")
  import numpy as np
  from matplotlib.figure import Figure

  # Draw two curves: the fit, and the widths with the same parameters.
  drawn = [advice.fit_depth, advice.num_layers]
  drawn += [sizes.num_layers] if sizes else []
  depths = np.linspace(1, max(60, 1.15 * max(drawn)), 201)
  total = fit.parameters(advice.fit_depth, advice.fit_width)
  figure = Figure(figsize=(6, 4.2), layout="constrained")
  axes = figure.subplots()
  axes.plot(depths, [fit.width(x) for x in depths], label="fit of d over L")
  same = np.sqrt(total / 12 / depths)
  axes.plot(depths, same, "--", label="as many parameters")
  # Mark the networks.
  axes.plot(advice.num_layers, advice.d_model, "o", label="to build")
  if sizes:
    axes.plot(sizes.num_layers, sizes.d_model, "s", label="the config")
  axes.axvspan(*fit.FITTED, alpha=0.08, label="depths of the fit")
  # Label the axes, widths by powers of two.
  axes.set_yscale("log")
  low, high = axes.get_ylim()
  ticks = [2**k for k in range(20) if low < 2**k < high]
  axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
  axes.minorticks_off()
  axes.set(xlabel="layers", ylabel="width d")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=150)
