r"""Advice on depth and width, from the depth-efficiency papers.

python -m jaxformers advise --params 125e6 --vocab 32000
python -m jaxformers advise --params 125e6 --vocab 32000 \
    --config configs/lm/text.py --out advice

The fit (`jaxformers.theory.fit`) is that of Levine et al.'s later version,
arXiv 2006.12467: log d = 5.039 + 0.0555 L, from decoders of 6 to 48 layers with
12 L d^2 parameters beside the embedding. The recommended network has the given
number of parameters within 10 %, from 10 M on within 5 %, and 96 layers at
most.

The vocabulary bounds the rank of the embedding. A width above that rank adds
nothing that the theory counts (arXiv 2105.03928): depth is the better use then.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

from jaxformers import cli
from jaxformers import config as configs
from jaxformers.errors import UserError
from jaxformers.theory import bounds
from jaxformers.theory.fit import (
  DEEPEST,
  EXTRAPOLATED,
  FITTED,
  VERDICTS,
  depth_of,
  explain_thresholds,
  parameters,
  place,
  width,
)


@dataclasses.dataclass(frozen=True)
class Advice:
  """Recommended sizes of a network with a given number of parameters.

  Attributes:
    num_layers, d_model: sizes by the fit, not rounded.
    layers, width: sizes to build. Heads divide the width: heads of 64, below
      512 of 32, below 256 of 16.
    bottleneck: smallest of width, vocabulary and rank of the embedding.
    fitted: True if the fit has networks of `layers` layers.
  """

  num_layers: float
  d_model: float
  layers: int
  width: int
  bottleneck: int
  fitted: bool


def advise(params: float, vocab: int = 0, rank: int = 0) -> Advice:
  """Recommends a depth and a width for a number of parameters.

  12 L d^2 of the recommended network is within 10 % of `params`, and within 5 %
  from 1e7 on. A vocabulary or rank below the fit's width reduces the width to
  it, and the parameters go into depth.

  Args:
    params: number of parameters, without embedding.
    vocab: number of ids of the vocabulary; 0 for no bound.
    rank: rank of the embedding; 0 for no bound.

  Raises:
    UserError: for a negative bound, for fewer parameters than one layer of the
      fit has, and if more than 96 layers would be needed.
  """
  if vocab < 0 or rank < 0:
    raise UserError(f"vocab={vocab}, rank={rank}: give 0 (no bound) or more.")
  # Find the sizes of the fit.
  depth = depth_of(params)
  d_model = width(depth)
  if depth > DEEPEST:
    most = math.floor(parameters(DEEPEST, width(DEEPEST)))
    raise UserError(
      f"params={params:,.0f}: the fit has {depth:.0f} layers of {d_model:,.0f} "
      f"channels for them, and nothing is recommended beyond {DEEPEST} layers, "
      f"twice the deepest network of the fit. Give --params {most} or less."
    )
  # Reduce the width to the bottleneck, and round to whole heads and layers.
  limits = {"vocab": vocab or math.inf, "rank": rank or math.inf}
  name = min(limits, key=lambda key: limits[key])
  narrowest = limits[name]
  layers, rounded = _round_sizes(params, min(d_model, narrowest), narrowest)
  # At this width, 96 layers may have too few parameters.
  if abs(parameters(layers, rounded) / params - 1) > _tolerance(params):
    raise UserError(_bottleneck_message(params, int(narrowest), name))
  bottleneck = int(min(rounded, narrowest))
  is_fitted = FITTED[0] <= layers <= FITTED[1]
  return Advice(depth, d_model, layers, rounded, bottleneck, is_fitted)


def _head_width(d_model: float) -> int:
  return 64 if d_model >= 512 else 32 if d_model >= 256 else 16


def _round_width(d_model: float, widest: float) -> int:
  """Returns the nearest width of whole heads that is not above `widest`."""
  head = _head_width(d_model)
  # Round to whole heads, and down if that is too wide.
  heads = max(round(d_model / head), 1)
  if heads * head > widest:
    heads = int(widest // head)
  # A bottleneck below one head is the width.
  return heads * head or int(widest)


def _round_sizes(
  params: float, d_model: float, widest: float
) -> tuple[int, int]:
  """Returns (layers, width) whose parameters come closest to `params`.

  The width is a multiple of the width of a head.

  Prefers sizes that the fit calls balanced, if they are within the tolerance.

  Args:
    params: number of parameters.
    d_model: width to round.
    widest: upper bound of the width.
  """
  # Round the width first, or else the depth.
  rounded = _round_width(d_model, widest)
  sizes = [(round(params / parameters(1, rounded)), rounded)]
  depth = params / parameters(1, d_model)
  # Try the depth below and above, each with its best width.
  for layers in (math.floor(depth), math.ceil(depth)):
    ideal = math.sqrt(params / parameters(max(layers, 1), 1))
    sizes.append((layers, _round_width(ideal, widest)))
  # Keep between 1 and 96 layers.
  sizes = [(min(max(n, 1), DEEPEST), wide) for n, wide in sizes]

  # Prefer sizes in the tolerance that the fit calls balanced.
  def cost(pair: tuple[int, int]) -> tuple[bool, float]:
    off = abs(parameters(*pair) / params - 1)
    return off > _tolerance(params) or place(*pair)[0] != "balanced", off

  return min(sizes, key=cost)


def _tolerance(params: float) -> float:
  """Returns the share of `params` by which the network may differ."""
  return 0.05 if params >= 1e7 else 0.1


def _bottleneck_message(params: float, narrowest: int, name: str) -> str:
  """Returns the message for a bottleneck that would need over 96 layers."""
  # Count the parameters of 96 layers of the bottleneck's width.
  d_model = _round_width(narrowest, narrowest)
  most = parameters(DEEPEST, d_model)
  # Find the least width of whole heads for which 96 layers suffice.
  ideal = math.sqrt(params / parameters(DEEPEST, 1))
  least = math.ceil(ideal / _head_width(ideal)) * _head_width(ideal)
  remedy = f"--{name} {least} or more"
  if most >= parameters(1, width(1)):
    remedy += f", or --params {most} or less"
  return (
    f"params={params:,.0f}: {name}={narrowest:,} bounds the useful width to "
    f"{d_model:,}, and {DEEPEST} layers of it, the most layers recommended, "
    f"have {most:,} parameters. Give {remedy}."
  )


class Sizes(NamedTuple):
  """Sizes of the config to compare.

  Attributes:
    num_layers, d_model: depth and width.
    mlp_dim: width of the feed-forward layer; 0 for layers of another form.
  """

  num_layers: int
  d_model: int
  mlp_dim: int

  @property
  def parameters(self) -> float:
    """Number of entries of the layers' kernels, L (4 d^2 + 2 d mlp_dim).

    Layers of another form count as those of the fit, 12 L d^2.
    """
    if not self.mlp_dim:
      return parameters(self.num_layers, self.d_model)
    d = self.d_model
    return self.num_layers * (4 * d * d + 2 * d * self.mlp_dim)


def _sizes(spec: str) -> Sizes:
  model = configs.plain(configs.load(spec))["model"]
  mlp_dim = model.get("block", {}).get("mlp_dim", 0)
  return Sizes(model["num_layers"], model["d_model"], mlp_dim)


def report(
  params: float, vocab: int, rank: int, sizes: Sizes | None
) -> list[str]:
  """Returns the lines of the advice.

  Args:
    params, vocab, rank: parameters and bounds; see `advise`.
    sizes: sizes of the config to compare, or None.
  """
  advice = advise(params, vocab, rank)
  built = parameters(advice.layers, advice.width)
  beyond = f"\n{'':21}{EXTRAPOLATED}"
  lines = [
    f"{params:,.0f} parameters without embedding:",
    f"  the fit            L = {advice.num_layers:.1f}, "
    f"d = {advice.d_model:.0f}",
    f"  to build           {advice.layers} layers of {advice.width} channels, "
    f"{built / 1e6:,.1f} M parameters ({built / params - 1:+.1%})"
    + ("" if advice.fitted else beyond),
    *explain_thresholds(advice.width, bounds.threshold(advice.width)),
  ]
  # Name the bottleneck, if there is one.
  narrow = {"vocabulary": vocab, "rank of the embedding": rank}
  if vocab or rank:
    # The smaller bound counts; 0 stands for none.
    least, name = min((n, name) for name, n in narrow.items() if n)
    is_tight = least < advice.d_model
    lines.append(
      f"  bottleneck         {name} {least:,}: "
      + (
        f"below the fit's width, so depth instead: "
        f"d = {advice.width},\n                     "
        "and more layers than the fit has for that width"
        if is_tight
        else "above the width, no bound"
      )
    )
  return lines + (_compare(sizes, narrow) if sizes else [])


def _compare(sizes: Sizes, narrow: dict[str, int]) -> list[str]:
  """Returns the lines that compare a config with the fit and the bounds."""
  depth, d_model = sizes.num_layers, sizes.d_model
  # Place the config by the fit at its depth.
  kind, share = place(depth, d_model)
  # The fit counts feed-forward layers of width 4 d.
  is_usual = sizes.mlp_dim == 4 * d_model
  lines = [
    f"the config: {depth} layers of {d_model} channels, "
    f"{sizes.parameters / 1e6:,.1f} M parameters"
    + ("" if is_usual else " (its layers have not the fit's form of 12 d^2)"),
    f"  fit at that depth  d = {width(depth):.0f}; it has {share:.2f} times "
    f"that: {VERDICTS[kind]}",
  ]
  return lines + [
    f"  bottleneck         {name} {n:,}, below its {d_model} channels: a "
    "wider one adds nothing"
    for name, n in narrow.items()
    if n and n < d_model
  ]


def draw(path: Path, advice: Advice, sizes: Sizes | None) -> None:
  """Draws width over depth: the fit, the advice and the config.

  Args:
    path: file of the picture; its suffix gives the format.
    advice: result of `advise`.
    sizes: sizes of the config to compare, or None.
  """
  from matplotlib.figure import Figure

  # Draw the curves: the fit, and widths of as many parameters.
  deepest = max(
    advice.num_layers, advice.layers, sizes.num_layers if sizes else 0
  )
  most = max(60, 1.15 * deepest)
  depths = [1 + k * (most - 1) / 200 for k in range(201)]
  figure = Figure(figsize=(6, 4.2), layout="constrained")
  axes = figure.subplots()
  axes.plot(depths, [width(x) for x in depths], label="fit of d over L")
  axes.plot(
    depths,
    [
      math.sqrt(parameters(advice.num_layers, advice.d_model) / 12 / x)
      for x in depths
    ],
    "--",
    label="as many parameters",
  )
  # Mark the networks.
  axes.plot(advice.layers, advice.width, "o", label="to build")
  if sizes:
    axes.plot(sizes.num_layers, sizes.d_model, "s", label="the config")
  axes.axvspan(*FITTED, alpha=0.08, label="depths of the fit")
  # Label the axes, widths by powers of two.
  axes.set_yscale("log")
  low, high = axes.get_ylim()
  ticks = [2**k for k in range(20) if low < 2**k < high]
  axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
  axes.minorticks_off()
  axes.set_xlabel("layers")
  axes.set_ylabel("width d")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=150)


@cli.command(
  cli.argument(
    "--params",
    type=float,
    required=True,
    help="number of parameters without the embedding, such as 125e6",
  ),
  cli.argument(
    "--vocab",
    default=0,
    help="size of the vocabulary, which bounds the width (default: no bound)",
  ),
  cli.argument(
    "--rank",
    default=0,
    help="rank of the embedding, which bounds the width (default: no bound)",
  ),
  cli.argument("--config", default="", help="path.py:key=value,..."),
  cli.argument("--out", default="", help="write OUT.png and OUT.svg"),
)
def main(params: float, vocab: int, rank: int, config: str, out: str) -> None:
  """Prints the advice, and draws it if asked."""
  sizes = _sizes(config) if config else None
  print("\n".join(report(params, vocab, rank, sizes)))
  if out:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
      picture = path.with_name(path.name + suffix)
      draw(picture, advise(params, vocab, rank), sizes)
    print(f"Written to {path}.png and .svg.")


if __name__ == "__main__":
  main()
