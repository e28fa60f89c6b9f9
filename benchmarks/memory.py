"""What a train step holds in memory, and what orthogonal maps take of it.

The paper's Text setting, 4,096 tokens in batches of 32: bytes that the compiler
plans beside the state, by what the backward pass takes and by the parts that a
batch is taken in; and of one setting, what a process of its own had in memory
at most. Against depth, with the reversible backward pass. And the time of all
maps of a step with their gradient beside the whole step.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.__main__ import main
from benchmarks.against import planned
from benchmarks.orthogonal import COUNT, drawn, ours
from benchmarks.speed import EXPERTS, LAYERS, D, build, train
from benchmarks.timing import in_a_process, interleaved, median, ratio
from jaxformers import orthogonal

TEXT = (32, 4_096)  # Batch and tokens.
ACTIVATIONS = ("stored", "recomputed", "reversible")
PARTS = (1, 8, 32)
DEPTHS = (2, 4, 8, 16, 32)
PAPER = (32, 2_048)  # What a paper-size step is.
PEAK = """
from benchmarks import speed
from benchmarks.encoders import peak
speed.train(speed.build("transject", {n}), {b}, {n}, {b})()
print(peak() / 2**30)
"""


def sized(activations: str, dtype: str, layers: int = LAYERS) -> dict[str, Any]:
  """Options of TransJect."""
  return {
    "num_layers": layers,
    "mixer": {"num_experts": EXPERTS},
    "activations": activations,
    "dtype": dtype,
  }


def text() -> list[dict[str, Any]]:
  """GiB of the paper's Text setting, by how it is held."""
  batch, n = TEXT
  rows = []
  for dtype in ("float32", "bfloat16"):
    for activations in ACTIVATIONS:
      model = build("transject", n, **sized(activations, dtype))
      row: dict[str, Any] = {"type": dtype, "activations": activations}
      for parts in PARTS:
        held = planned(model, batch, n, parts)
        row[f"GiB, accumulate={parts}"] = held / 2**30
      rows.append(row)
  whole = in_a_process(PEAK.format(b=batch, n=n))
  rows.append(
    {
      "type": "float32",
      "activations": "stored, all of a process",
      f"GiB, accumulate={batch}": float(whole),
    }
  )
  return rows


def depth() -> list[dict[str, Any]]:
  """MB of a train step by depth: 4 samples of 4,096 tokens, d = 64."""
  rows = []
  for activations in ACTIVATIONS:
    row: dict[str, Any] = {"activations": activations}
    for layers in DEPTHS:
      model = build(
        "transject",
        4_096,
        d_model=64,
        **sized(activations, "float32", layers),
      )
      row[f"MB, L = {layers}"] = planned(model, 4, 4_096) / 1e6
    rows.append(row)
  return rows


def maps(rounds: int) -> list[dict[str, Any]]:
  """Seconds of all maps of a step and their gradient, beside the step."""
  batch, n = PAPER
  a, w = drawn(D)
  calls = {"train step": train(build("transject", n), batch, n)}
  calls |= {name: ours(name, a, w)["step"] for name in orthogonal.MAPS}
  seconds = interleaved(calls, rounds)
  return [
    {
      "map": name,
      "matrices": f"{COUNT} of d = {D}",
      "s": median(seconds, name),
      "share of a step of 32 x 2048": 1 / ratio(seconds, "train step", name),
    }
    for name in orthogonal.MAPS
  ]


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
  """Memory, and what maps take."""
  return {
    "memory of Text": text(),
    "memory by depth": depth(),
    "orthogonal maps": maps(rounds),
  }


if __name__ == "__main__":
  main(["--tables=memory", *sys.argv[1:]])
