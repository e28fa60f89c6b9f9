r"""Measures how trained models use their depth, layer by layer.

jaxformers depth_use runs/transformer runs/neutreno --out depth_use
jaxformers depth_use runs/transformer --untrained

For each layer the command prints what it adds to its input, what changes
without it, and how far the outputs are when the model ends there. A layer that
adds little, and without which neither the later layers nor the loss change, is
of little use.
Source: Csordas et al. 2025, https://arxiv.org/abs/2505.13898.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.evaluation import depth_use
from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Row, Texts
from jaxformers.analysis.tokens import curves
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements
from jaxformers.models.variables import make_variables


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
  rows: list[Row] = []
  draws = states.Draws(workdirs, state, samples, length, split)
  for draw in draws:
    variables = make_variables(draw.run.model, draw.run.params)
    measured = depth_use.measure(draw.run.model, variables, draw.batch)
    rows += [
      (draw.label, draw.seed, name, layer, float(value))
      for name, values in measured.items()
      for layer, value in enumerate(values, 1)
    ]
  # Print the table and the caption, and draw the figure.
  texts = Texts(
    Path(out or "depth_use").name, "How layers are used", f"{draws.caption}."
  )
  picture = plots.curves(texts, rows, "layer", depth_use.MEASURES)
  print(f"{curves.text(rows, depth_use.MEASURES)}\n\n{picture.caption}")
  if out:
    picture.write(Path(out).parent)
    print(f"\nWritten to {out}.csv, .png and .svg.")


if __name__ == "__main__":
  main()
