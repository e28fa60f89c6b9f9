r"""Cost of NeuTRENO's term: DeiT-tiny with and without it.

python -m benchmarks.fidelity --out fidelity.json

Images of 224 x 224 in patches of 16, a forward pass and a train step (forward,
backward, Adam), rounds interleaved; the ratio is the median of the rounds'
ratios, compile time apart. Memory is what the compiler plans for the step
beside its inputs and outputs.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ours
from benchmarks.data import save, table
from benchmarks.timing import interleaved, median, ratio
from jaxformers import models
from jaxformers.recipes import vision

ROUNDS = 15
NAMES = ("transformer", "neutreno")


def _compile(
  name: str, size: int, batch: int, layers: int
) -> dict[str, ours.Program]:
  """Compiles the forward pass and train step of a DeiT."""
  options = vision.models(name, patch_size=16)["model"] | {"num_layers": layers}
  model = models.build(
    **options, vocab_size=0, max_len=0, num_classes=1_000, image=(size, size, 3)
  )
  x = jax.random.normal(jax.random.key(0), (batch, size, size, 3))
  return ours.compile_passes(
    model, x, jnp.arange(batch), learning_rate=1e-3, train=False
  )


def measure_cost(
  size: int = 224, batch: int = 4, layers: int = 12, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
  """Returns seconds, ratio and memory of both models: `forward` and `step`."""
  programs = {name: _compile(name, size, batch, layers) for name in NAMES}
  rows = []
  for kind in ("forward", "step"):
    seconds = interleaved(
      {name: programs[name][kind].call for name in NAMES}, rounds
    )
    # Memory depends on the programs alone.
    memory = [programs[name][kind].planned_bytes for name in NAMES]
    rows.append(
      {
        "what": kind,
        "softmax s": median(seconds, "transformer"),
        "with the term s": median(seconds, "neutreno"),
        "time": ratio(seconds, "neutreno", "transformer"),
        "softmax MB": memory[0] / 1e6,
        "with the term MB": memory[1] / 1e6,
        "memory": memory[1] / memory[0],
      }
    )
  return rows


def main(argv: list[str] | None = None) -> None:
  """Prints the rows as Markdown."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--batch", type=int, default=4)
  parser.add_argument("--rounds", type=int, default=ROUNDS)
  parser.add_argument("--out", help="path of the JSON")
  args = parser.parse_args(argv)
  rows = measure_cost(batch=args.batch, rounds=args.rounds)
  print(table(rows))
  save({"rows": rows}, args.out)


if __name__ == "__main__":
  main()
