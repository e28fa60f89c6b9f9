r"""Cost of NeuTRENO's term: DeiT-tiny with and without it.

python -m benchmarks.fidelity --out fidelity.json

The table has the times of a forward pass and of a train step (forward,
backward, Adam) on images of 224 x 224 pixels in patches of 16, in interleaved
rounds without compilation. The ratio is the median of the ratios of all rounds.
Memory is the compiler's plan for a pass, without its inputs and outputs.
"""

from __future__ import annotations

import jax

from benchmarks import ours
from benchmarks.data import OUT, Rows, report
from benchmarks.timing import interleaved, median, ratio
from jaxformers import models
from jaxformers.foundations import cli
from jaxformers.recipes import vision

ROUNDS = 15
NAMES = ("transformer", "neutreno")


def _compile(name: str, size: int, batch: int, layers: int) -> ours.Programs:
  """Compiles the forward pass and train step of a DeiT."""
  options = vision.model_fields(name, patch_size=16)["model"] | {
    "num_layers": layers
  }
  # An image classifier has no vocabulary and no length of text.
  model = models.build(
    **options, vocab_size=0, max_len=0, num_classes=1_000, image=(size, size, 3)
  )
  x = jax.random.normal(jax.random.key(0), (batch, size, size, 3))
  return ours.compile_passes(model, x, train=False)


def measure_cost(
  size: int = 224, batch: int = 4, layers: int = 12, rounds: int = ROUNDS
) -> Rows:
  """Yields a row for the forward pass and one for the train step."""
  programs = {name: _compile(name, size, batch, layers) for name in NAMES}
  for kind in ("forward", "step"):
    calls = {name: programs[name][kind].call for name in NAMES}
    seconds = interleaved(calls, rounds)
    # Memory depends only on the programs, and not on the rounds.
    memory = [programs[name][kind].planned_bytes for name in NAMES]
    yield {
      "what": kind,
      "softmax s": median(seconds, "transformer"),
      "with the term s": median(seconds, "neutreno"),
      "time": ratio(seconds, "neutreno", "transformer"),
      "softmax MB": memory[0] / 1e6,
      "with the term MB": memory[1] / 1e6,
      "memory": memory[1] / memory[0],
    }


@cli.command(
  cli.argument("--batch", default=4, help="number of images per step"),
  cli.argument("--rounds", default=ROUNDS, help="number of timed rounds"),
  OUT,
)
def main(batch: int, rounds: int, out: str) -> None:
  """Prints the rows, and writes them as JSON if --out is set."""
  report([("rows", measure_cost(batch=batch, rounds=rounds))], out)


if __name__ == "__main__":
  main()
