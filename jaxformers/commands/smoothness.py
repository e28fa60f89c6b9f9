r"""Measures over-smoothing: how similar tokens become, and its functional.

jaxformers smoothness runs/transformer runs/neutreno \
    --out smoothness
jaxformers smoothness runs/transformer --untrained --split train
jaxformers smoothness runs/transformer --model neutreno \
    --options mixer.fidelity=0.6

The command evaluates the curves by layer for trained models. It saves their
means over the layers in the run's `scores.json`, which `jaxformers
published` reads.
Source: Nguyen et al. 2023 (NeuTRENO), https://arxiv.org/abs/2312.00751. Numbers
of equations refer to this paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers.analysis.plotting.figures import Row
from jaxformers.analysis.tokens import curves
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements


@cli.command(
  cli.WORKDIRS,
  *states.STATE,
  cli.option("samples", 64, "number of samples"),
  cli.option("length", 512, "largest number of tokens per sample"),
  states.SPLIT,
  cli.option("out", "", "write OUT.csv, OUT.png and OUT.svg"),
)
def main(
  workdirs: Sequence[Path],
  samples: int,
  length: int,
  split: str,
  out: str,
  **state: Any,
) -> None:
  """Prints a table for each run, and draws the figure if --out is set.

  The command compares the trained weights with the initial weights, and with
  other weights or another model, if the arguments ask for them.
  """
  # Check for the plotting library before the measurement.
  if out:
    requirements.require("plots", f"--out={out}")
  # Measure every state of every run.
  curve_rows: list[Row] = []
  draws = states.Draws(workdirs, state, samples, length, split)
  for draw in draws:
    ids = draw.batch["inputs"]
    measured = curves.measure_curves(draw.run.model, draw.run.params, ids)
    # Record means over the layers, as in the paper's table 4.
    means = {k: float(np.mean(values)) for k, values in measured.items()}
    how: dict[str, Any] = {"split": split, "samples": len(ids)}
    # Longer samples were cut; images have no length.
    if length < (draw.run.task.max_len or 0):
      how["length"] = length
    scored = (draw.state, "smoothness", means, len(ids))
    states.record(draw.run, draw.folder, *scored, **how)
    curve_rows += curves.rows(draw.label, draw.seed, measured)
  # Print the table and the caption, and draw the figure.
  name = Path(out or "smoothness").name
  picture = curves.figure(curve_rows, draws.caption, name)
  print(f"{curves.text(curve_rows)}\n\n{picture.caption}")
  if out:
    picture.write(Path(out).parent)
    print(f"\nWritten to {out}.csv, .png and .svg.")


if __name__ == "__main__":
  main()
