"""How much faster than a Transformer TransJect answers, by length.

TransJect with one expert beside our Transformer and PyTorch's encoder, whose
attention is `scaled_dot_product_attention`: L = 6, d = 512, 8 heads, d_ff =
2048, float32, orthogonal matrices at hand; the paper's figures (Table 3) beside
ours. And how time and memory grow with the length, as fitted exponents.
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from benchmarks.__main__ import main
from benchmarks.speed import (
  D,
  batch_of,
  build,
  infer,
  step_of,
  torch_infer,
  train,
)
from benchmarks.timing import exponent, interleaved, median, ratio, threads
from jaxformers.training import compilers

LAYERS, HEADS, MLP_DIM = 6, 8, 2_048
PAPER = {1_024: 5.0, 2_048: 9.6, 3_072: 12.8, 4_096: 26.3}
GROWTH = (512, 1_024, 2_048, 4_096, 8_192, 16_384)


def speed_ups(rounds: int) -> list[dict[str, Any]]:
  """Inference at every length of the paper's, one sample."""
  import torch

  from benchmarks import rivals

  torch.set_num_threads(threads())
  torch.backends.mha.set_fastpath_enabled(False)
  rows = []
  for n in PAPER:
    own = build("transject", n, num_layers=LAYERS, mixer={"num_experts": 1})
    other = build(
      "transformer",
      n,
      num_layers=LAYERS,
      mixer={"num_heads": HEADS},
      block={"mlp_dim": MLP_DIM},
    )
    theirs = rivals.Transformer(n, D, LAYERS, HEADS, MLP_DIM)
    seconds = interleaved(
      {
        "TransJect": infer(own, 1, n),
        "Transformer": infer(other, 1, n),
        "PyTorch": torch_infer(theirs, 1, n),
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


def planned(model: Any, batch: int, length: int, parts: int = 1) -> int:
  """Bytes that the compiler plans for a train step beside its state."""
  step, layout, create = step_of(model, parts)
  start = jax.eval_shape(create)
  rows = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(batch, length)
  )
  run, _ = compilers.compile_step("jit", step, layout, state=start, donate=True)
  program = run.lower(start, rows).compile()
  return program.memory_analysis().temp_size_in_bytes


def growth(rounds: int) -> list[dict[str, Any]]:
  """Seconds and bytes by length, and their exponents; one sample."""
  rows = []
  for name in ("transject", "random_transject"):
    calls = {}
    for n in GROWTH:
      model = build(name, n)
      calls[f"train step {n}"] = train(model, 1, n)
      calls[f"inference {n}"] = infer(model, 1, n)
    seconds = interleaved(calls, rounds)
    found = {
      what: [median(seconds, f"{what} {n}") for n in GROWTH]
      for what in ("train step", "inference")
    }
    found["memory"] = [float(planned(build(name, n), 1, n)) for n in GROWTH]
    for what, values in found.items():
      scale, unit = (1e-6, "MB") if what == "memory" else (1.0, "s")
      rows.append(
        {
          "model": name,
          "of": f"{what}, {unit}",
          **{
            f"n = {n}": scale * v for n, v in zip(GROWTH, values, strict=True)
          },
          "exponent": exponent(GROWTH, values),
        }
      )
  return rows


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
  """Speed-ups and growth."""
  return {"against Transformers": speed_ups(rounds), "growth": growth(rounds)}


if __name__ == "__main__":
  main(["--tables=against", *sys.argv[1:]])
