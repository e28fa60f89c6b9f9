"""Memory of a train step, and the share of the orthogonal maps in its time.

The first table uses the paper's setting of Text, with 4,096 tokens in batches
of 32. It has the memory that the compiler plans besides the state, for each
memory mode and number of microbatches. For one setting, it also has the peak
memory of a process. The second table has the memory by depth for each memory
mode. The third table compares the time of all orthogonal maps and their
gradients with the time of a train step.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from benchmarks import ours
from benchmarks.__main__ import main
from benchmarks.data import Rows
from benchmarks.orthogonal import COUNT, draw_matrices, make_calls
from benchmarks.timing import in_a_process, interleaved, median, ratio
from jaxformers import orthogonal

TEXT = (32, 4_096)  # Batch size, and tokens per row.
ACTIVATIONS = ("stored", "recomputed", "reversible")
PARTS = (1, 8, 32)  # Numbers of microbatches.
DEPTHS = (2, 4, 8, 16, 32)
# Batch size and length of the train step that the maps are compared with.
PAPER = (32, 2_048)
# Code that trains one step with one row per microbatch, and prints the peak in
# GiB.
PEAK = """
from benchmarks import ours, timing
ours.train(ours.build("transject", {n}), {b}, {n}, {b})()
print(timing.peak_memory() / 2**30)
"""


def transject_options(
  activations: str, dtype: str, layers: int = ours.LAYERS
) -> dict[str, Any]:
  """Returns options of TransJect for `ours.build`.

  Args:
    activations: memory mode.
    dtype: type of the activations.
    layers: number of layers.
  """
  return {
    "num_layers": layers,
    "mixer": {"num_experts": ours.EXPERTS},
    "memory": activations,
    "dtype": dtype,
  }


def text() -> Rows:
  """Yields GiB of a train step on Text, by dtype, memory mode and microbatches.

  The compiler plans all figures except the last row, which is measured.
  """
  batch, n = TEXT
  for dtype, kind in itertools.product(("float32", "bfloat16"), ACTIVATIONS):
    model = ours.build("transject", n, **transject_options(kind, dtype))
    row = {"type": dtype, "activations": kind}
    for parts in PARTS:
      planned = ours.planned_bytes(model, batch, n, parts)
      row[f"GiB, accumulate={parts}"] = planned / 2**30
    yield row
  # For comparison, the peak of a process that trains.
  peak = float(in_a_process(PEAK.format(b=batch, n=n)))
  row = {"type": "float32", "activations": "stored, all of a process"}
  yield row | {f"GiB, accumulate={batch}": peak}


def depth() -> Rows:
  """Yields MB of a train step by depth, with 4 x 4,096 tokens and d = 64."""
  for kind in ACTIVATIONS:
    row = {"activations": kind}
    for layers in DEPTHS:
      options = transject_options(kind, "float32", layers)
      model = ours.build("transject", 4_096, d_model=64, **options)
      row[f"MB, L = {layers}"] = ours.planned_bytes(model, 4, 4_096) / 1e6
    yield row


def maps(rounds: int) -> Rows:
  """Compares the time of all maps and their gradients with a train step."""
  # Time the maps and the step in turns.
  batch, n = PAPER
  a, w = draw_matrices(ours.D)
  calls = {name: make_calls(name, a, w)["step"] for name in orthogonal.MAPS}
  calls["train step"] = ours.train(ours.build("transject", n), batch, n)
  seconds = interleaved(calls, rounds)
  for name in orthogonal.MAPS:
    yield {
      "map": name,
      "matrices": f"{COUNT} of d = {ours.D}",
      "s": median(seconds, name),
      # `ratio` divides the step by the map; the share is its inverse.
      "share of a step of 32 x 2048": 1 / ratio(seconds, "train step", name),
    }


def tables(rounds: int) -> dict[str, Rows]:
  """Measures the memory, and the share of the orthogonal maps in the time."""
  return {
    "memory of Text": text(),
    "memory by depth": depth(),
    "orthogonal maps": maps(rounds),
  }


if __name__ == "__main__":
  main(["--tables=memory", *sys.argv[1:]])
