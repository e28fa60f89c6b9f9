"""Speed of TransJect's inference beside Transformers, by length.

TransJect with one expert beside our Transformer and PyTorch's encoder, whose
attention is `scaled_dot_product_attention`: L = 6, d = 512, 8 heads, d_ff =
2048, float32, orthogonal matrices at hand; the paper's figures (Table 3) beside
ours. A second table has the growth of time and memory with the length, as
fitted exponents.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import ours
from benchmarks.__main__ import main
from benchmarks.timing import exponent, interleaved, median, ratio

LAYERS, HEADS, MLP_DIM = 6, 8, 2_048
# Speed-up over the Transformer in the paper's Table 3, by length.
PAPER = {1_024: 5.0, 2_048: 9.6, 3_072: 12.8, 4_096: 26.3}
# Lengths through whose figures the exponents are fitted.
GROWTH = (512, 1_024, 2_048, 4_096, 8_192, 16_384)


def speed_ups(rounds: int) -> list[dict[str, Any]]:
  """Times inference of one sample at every length in the paper."""
  from benchmarks import rivals  # PyTorch is an extra.

  rows = []
  for n in PAPER:
    # Build the three encoders at one size, and time them in turns.
    transject = ours.build(
      "transject", n, num_layers=LAYERS, mixer={"num_experts": 1}
    )
    transformer = ours.build(
      "transformer",
      n,
      num_layers=LAYERS,
      mixer={"num_heads": HEADS},
      block={"mlp_dim": MLP_DIM},
    )
    pytorch = rivals.Transformer(n, ours.D, LAYERS, HEADS, MLP_DIM)
    seconds = interleaved(
      {
        "TransJect": ours.infer(transject, 1, n),
        "Transformer": ours.infer(transformer, 1, n),
        "PyTorch": rivals.infer(pytorch, 1, n),
      },
      rounds,
    )
    rows.append(
      {
        "n": n,
        **{f"{name} s": median(seconds, name) for name in seconds},
        "times Transformer": ratio(seconds, "Transformer", "TransJect"),
        "times PyTorch": ratio(seconds, "PyTorch", "TransJect"),
        "the paper's": PAPER[n],
      }
    )
  return rows


def growth(rounds: int) -> list[dict[str, Any]]:
  """Measures seconds and bytes of one sample by length, and fits exponents."""
  rows = []
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
    # Memory is planned by the compiler: nothing runs.
    figures["memory"] = [
      float(ours.planned_bytes(ours.build(name, n), 1, n)) for n in GROWTH
    ]
    for quantity, values in figures.items():
      # A row for each quantity: its figure at each length, and the exponent.
      scale, unit = (1e-6, "MB") if quantity == "memory" else (1.0, "s")
      rows.append(
        {
          "model": name,
          "of": f"{quantity}, {unit}",
          **{
            f"n = {n}": scale * v for n, v in zip(GROWTH, values, strict=True)
          },
          "exponent": exponent(GROWTH, values),
        }
      )
  return rows


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
  """Measures speed-ups and growth."""
  return {"against Transformers": speed_ups(rounds), "growth": growth(rounds)}


if __name__ == "__main__":
  main(["--tables=against", *sys.argv[1:]])
