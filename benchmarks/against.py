"""Speed of inference of TransJect and of Transformers, by length.

The first table times inference of TransJect with one expert, of our
Transformer, and of PyTorch's encoder, whose attention is
`scaled_dot_product_attention`. The sizes are L = 6, d = 512, 8 heads and
d_ff = 2048, in float32. Orthogonal matrices are computed before the
measurement. The table also lists the paper's speed-ups (table 3).

The second table has the growth of time and memory with the length, as fitted
exponents, for TransJect and Random-TransJect at L = 2, E = 4.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import ours
from benchmarks.__main__ import main
from benchmarks.data import Rows
from benchmarks.timing import exponent, interleaved, median, ratio
from jaxformers.analysis.tables import speed

LAYERS, HEADS, MLP_DIM = 6, 8, 2_048
# Names and options of our two encoders, by title.
OURS: dict[str, Any] = {
  "TransJect": ("transject", {"mixer": {"num_experts": 1}}),
  "Transformer": (
    "transformer",
    {"mixer": {"num_heads": HEADS}, "block": {"mlp_dim": MLP_DIM}},
  ),
}
# Speed-up over the Transformer in the paper's Table 3, by length.
PAPER = dict(
  zip(speed.LENGTHS, speed.SPEED_UPS["TransJect, E = 1"], strict=True)
)
# Lengths at which the exponents are fitted.
GROWTH = (512, 1_024, 2_048, 4_096, 8_192, 16_384)


def speed_ups(rounds: int) -> Rows:
  """Yields inference times of one sample at every length of the paper."""
  from benchmarks import rivals  # PyTorch is an extra.

  for n in PAPER:
    # Build the three encoders at one size, and time them in turns.
    pytorch = rivals.Transformer(n, ours.D, LAYERS, HEADS, MLP_DIM)
    calls = {"PyTorch": rivals.infer(pytorch, 1, n)}
    for title, (name, options) in OURS.items():
      model = ours.build(name, n, num_layers=LAYERS, **options)
      calls[title] = ours.infer(model, 1, n)
    seconds = interleaved(calls, rounds)
    yield {
      "n": n,
      **{f"{title} s": median(seconds, title) for title in (*OURS, "PyTorch")},
      "times Transformer": ratio(seconds, "Transformer", "TransJect"),
      "times PyTorch": ratio(seconds, "PyTorch", "TransJect"),
      "the paper's": PAPER[n],
    }


def growth(rounds: int) -> Rows:
  """Yields seconds and MB of one sample by length, and fitted exponents."""
  for name in ("transject", "random_transject"):
    # Time all lengths in turns.
    calls = {}
    for n in GROWTH:
      model = ours.build(name, n)
      calls[f"train step {n}"] = ours.train(model, 1, n)
      calls[f"inference {n}"] = ours.infer(model, 1, n)
    seconds = interleaved(calls, rounds)
    # Fit an exponent to each quantity.
    figures = {
      quantity: [median(seconds, f"{quantity} {n}") for n in GROWTH]
      for quantity in ("train step", "inference")
    }
    # The compiler plans the memory: nothing runs.
    figures["memory"] = [
      float(ours.planned_bytes(ours.build(name, n), 1, n)) for n in GROWTH
    ]
    # Yield a row for each quantity: its values by length, and the exponent.
    for quantity, values in figures.items():
      scale, unit = (1e-6, "MB") if quantity == "memory" else (1.0, "s")
      lengths = [f"n = {n}" for n in GROWTH]
      yield {
        "model": name,
        "of": f"{quantity}, {unit}",
        **{n: scale * v for n, v in zip(lengths, values, strict=True)},
        "exponent": exponent(GROWTH, values),
      }


def tables(rounds: int) -> dict[str, Rows]:
  """Measures the tables of speed-ups and of growth."""
  return {"against Transformers": speed_ups(rounds), "growth": growth(rounds)}


if __name__ == "__main__":
  main(["--tables=against", *sys.argv[1:]])
