r"""How deep and how wide: advice from the depth-efficiency papers.

python -m jaxformers.theory.advise --params 125e6 --vocab 32000
python -m jaxformers.theory.advise --params 125e6 --vocab 32000 \
    --config configs/lm/text.py --out advice

The fit is that of Levine et al.'s later version, "The Depth-to-Width Interplay
in Self-Attention" (arXiv 2006.12467): a network of L layers uses them well from
log d = 5.039 + 0.0555 L on, with 12 L d^2 parameters beside the embedding. It
was made on decoders of 6 to 48 layers. Their theory says that log d grows
linearly in L, and not how fast: by its letter d would be 3^L.

A width above the rank of the embedding, which the vocabulary bounds, adds
nothing that the theory counts (arXiv 2105.03928); then depth is the better use.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

from jaxformers import config as configs
from jaxformers.theory import bounds

INTERCEPT, SLOPE = 5.039, 0.0555
FITTED = (6, 48)  # Layers of the networks of the fit.
DEEPEST = 2 * FITTED[1]  # Beyond, nothing is recommended.


def width(num_layers: float) -> float:
  """d from which L layers are used well: exp(5.039 + 0.0555 L)."""
  return math.exp(INTERCEPT + SLOPE * num_layers)


def parameters(num_layers: float, d_model: float) -> float:
  """12 L d^2, without embedding: attention of 4 d^2, feed-forward of 8 d^2."""
  return 12 * num_layers * d_model**2


def depth_of(params: float) -> float:
  """L of the fit's network of so many parameters, by bisection.

  Raises:
    ValueError: for fewer parameters than a layer of the fit has.
  """
  if not math.isfinite(params):
    raise ValueError(f"params={params}: give a number such as 125e6.")
  low, high = 1.0, 400.0
  least, most = (parameters(x, width(x)) for x in (low, high))
  if not least <= params <= most:
    raise ValueError(
      f"params={params:,.0f}: the fit has networks of {least:,.0f} parameters "
      "on, without embedding."
    )
  for _ in range(80):
    middle = (low + high) / 2
    below = parameters(middle, width(middle)) < params
    low, high = (middle, high) if below else (low, middle)
  return (low + high) / 2


@dataclasses.dataclass(frozen=True)
class Advice:
  """What a number of parameters is best used for.

  Attributes:
    num_layers, d_model: the fit's, not rounded.
    layers, width: rounded to what can be built: a width that heads of 64 (below
      512: of 32) divide, with the parameters as near as it lets them.
    bottleneck: the least of width, vocabulary and rank of the embedding.
    fitted: whether `layers` lies within the fit's depths.
  """

  num_layers: float
  d_model: float
  layers: int
  width: int
  bottleneck: int
  fitted: bool


def advise(params: float, vocab: int = 0, rank: int = 0) -> Advice:
  """The recommended depth and width.

  A vocabulary or rank below the width bounds what a width is worth: the width
  is cut to it and the parameters go into depth, up to twice the fit's: what is
  left then is better not spent.

  Args:
    params: without embedding.
    vocab: ids of the vocabulary; 0 for no bound.
    rank: of the embedding; 0 for no bound.

  Raises:
    ValueError: for what is negative, or too few parameters.
  """
  if vocab < 0 or rank < 0:
    raise ValueError(f"vocab={vocab}, rank={rank}: they are not negative.")
  depth = depth_of(params)
  wide = width(depth)
  narrowest = min([n for n in (vocab, rank) if n] or [math.inf])
  used = min(wide, narrowest)
  head = 64 if used >= 512 else 32
  rounded = max(round(used / head), 1) * head
  if rounded > narrowest:  # Below one head the width is the bottleneck's own.
    rounded = math.floor(narrowest / head) * head or int(narrowest)
  layers = min(max(round(params / parameters(1, rounded)), 1), DEEPEST)
  return Advice(
    depth,
    wide,
    layers,
    rounded,
    int(min(rounded, narrowest)),
    FITTED[0] <= layers <= FITTED[1],
  )


def place(num_layers: int, d_model: int) -> tuple[str, float]:
  """Where a network lies: ("deep" | "wide" | "balanced", d / d*).

  "deep" if it is narrower than three quarters of the fit's width at its depth,
  so that layers are wasted; "wide" if it is wider than four thirds of it, so
  that more layers would be used; balanced between.
  """
  share = d_model / width(num_layers)
  if share < 3 / 4:
    return "deep", share
  return ("wide" if share > 4 / 3 else "balanced"), share


class Sizes(NamedTuple):
  """Of the config in hand.

  Attributes:
    num_layers, d_model: L and d.
    mlp_dim: width of the feed-forward, 0 for layers of another form.
  """

  num_layers: int
  d_model: int
  mlp_dim: int

  @property
  def parameters(self) -> float:
    """Of the kernels of its layers: L (4 d^2 + 2 d mlp_dim).

    For layers of another form the fit's 12 L d^2.
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
  params: float, vocab: int, rank: int, own: Sizes | None
) -> list[str]:
  """The advice in lines.

  Args:
    params, vocab, rank: see `advise`.
    own: of the config in hand, or None.
  """
  found = advise(params, vocab, rank)
  built = parameters(found.layers, found.width)
  lines = [
    f"{params:,.0f} parameters without embedding:",
    f"  the fit            L = {found.num_layers:.1f}, d = {found.d_model:.0f}",
    f"  to build           {found.layers} layers of {found.width} channels, "
    f"{built / 1e6:,.1f} M parameters"
    + ("" if found.fitted else " (beyond the 6 to 48 layers of the fit)"),
    "  theory's threshold "
    f"log_3 d = {bounds.threshold(found.width):.2f} layers",
  ]
  narrow = {"vocabulary": vocab, "rank of the embedding": rank}
  if vocab or rank:
    least = min((n, name) for name, n in narrow.items() if n)
    tight = least[0] < found.d_model
    lines.append(
      f"  bottleneck         {least[1]} {least[0]:,}: "
      + (
        f"below the fit's width, so depth instead: d = {found.width}"
        if tight
        else "above the width, no bound"
      )
    )
  if found.layers == DEEPEST and built < 0.9 * params:
    lines.append(
      f"  more parameters    would go into more than {DEEPEST} layers: widen "
      "the bottleneck, or spend less"
    )
  if own:
    depth, d_model = own.num_layers, own.d_model
    kind, share = place(depth, d_model)
    means = {
      "deep": "too deep for its width: fewer, wider layers would do better",
      "wide": "wide: more layers would be used",
      "balanced": "near the fit",
    }
    lines += [
      f"the config: {depth} layers of {d_model} channels, "
      f"{own.parameters / 1e6:,.1f} M parameters"
      + (
        ""
        if own.mlp_dim == 4 * d_model
        else " (its layers have not the fit's form of 12 d^2)"
      ),
      f"  fit at that depth  d = {width(depth):.0f}; it has {share:.2f} times "
      f"that: {means[kind]}",
    ]
    tight = {name: n for name, n in narrow.items() if n and n < d_model}
    lines += [
      f"  bottleneck         {name} {n:,}, below its {d_model} channels: a "
      "wider one adds nothing"
      for name, n in tight.items()
    ]
  return lines


def draw(path: Path, found: Advice, own: Sizes | None) -> None:
  """Draws the fit, the advice and the config, width over depth.

  Args:
    path: of the picture; its suffix says the format.
    found: of `advise`.
    own: of the config in hand, or None.
  """
  from matplotlib.figure import Figure

  deepest = max(found.num_layers, found.layers, own.num_layers if own else 0)
  most = max(60, 1.15 * deepest)
  depths = [1 + k * (most - 1) / 200 for k in range(201)]
  figure = Figure(figsize=(6, 4.2), layout="constrained")
  axes = figure.subplots()
  axes.plot(depths, [width(x) for x in depths], label="fit of d over L")
  axes.plot(
    depths,
    [
      math.sqrt(parameters(found.num_layers, found.d_model) / 12 / x)
      for x in depths
    ],
    "--",
    label="as many parameters",
  )
  axes.plot(found.layers, found.width, "o", label="to build")
  if own:
    axes.plot(own.num_layers, own.d_model, "s", label="the config")
  axes.axvspan(*FITTED, alpha=0.08, label="depths of the fit")
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


def main(argv: list[str] | None = None) -> None:
  """Prints the advice, and draws it if asked."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxformers.theory.advise",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--params", type=float, required=True, help="without embedding: 125e6"
  )
  parser.add_argument("--vocab", type=int, default=0, help="default: no bound")
  parser.add_argument(
    "--rank", type=int, default=0, help="of the embedding; default: no bound"
  )
  parser.add_argument("--config", default="", help="path.py:key=value,...")
  parser.add_argument("--out", default="", help="OUT.png and OUT.svg")
  args = parser.parse_args(argv)
  try:
    own = _sizes(args.config) if args.config else None
    print("\n".join(report(args.params, args.vocab, args.rank, own)))
    found = advise(args.params, args.vocab, args.rank)
  except ValueError as error:
    sys.exit(f"error: {error}")
  if args.out:
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
      draw(out.with_name(out.name + suffix), found, own)
    print(f"Written to {out}.png and .svg.")


if __name__ == "__main__":
  main()
