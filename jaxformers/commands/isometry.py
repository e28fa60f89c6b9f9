r"""Measures dynamical isometry: singular values of an encoder's Jacobian.

jaxformers isometry runs/transject runs/transformer --out isometry
jaxformers isometry runs/transformer --untrained

A map is a dynamical isometry if all singular values of its Jacobian are near 1.
Small changes of its input then neither grow nor vanish (TransJect, section 2;
Pennington et al. 2017, https://arxiv.org/abs/1711.04735). Each Jacobian covers
all tokens of one sequence. There is one Jacobian for each layer, and one for
all layers together, from the embedding to the last layer. It excludes a norm at
the end of the encoder. In the Jacobian of a layer, the values that an earlier
layer passes on (TransJect's Sigma, NeuTRENO's values) are constants.

A Jacobian of at most 2,048 rows (tokens times d) is computed exactly, by one
vector-Jacobian product per row, and decomposed. The distribution of a larger
one is estimated by Lanczos bidiagonalization from a random vector, with --steps
steps. Each step takes two vector-Jacobian products and one Jacobian-vector
product, for all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.plotting.figures import Row
from jaxformers.analysis.tokens import isometry
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.errors import UserError


@cli.command(
  cli.WORKDIRS,
  *states.STATE,
  cli.option("samples", 4, "number of samples"),
  cli.option("length", 32, "largest number of tokens per sample"),
  cli.option("steps", 32, "steps of Lanczos' method for large Jacobians"),
  cli.option("seed", 0, "seed of the samples and of Lanczos' method"),
  states.SPLIT,
  cli.option("out", "", "write OUT.csv, OUT.png and OUT.svg"),
)
def main(
  workdirs: Sequence[Path],
  samples: int,
  length: int,
  steps: int,
  seed: int,
  split: str,
  out: str,
  **state: Any,
) -> None:
  """Prints a table for each run, and draws the figure if --out is set.

  The command compares the trained weights with the initial weights, and with
  other weights or another model, if the arguments ask for them.
  """
  # Check the arguments before the measurement.
  if steps < 1:
    raise UserError(f"--steps={steps}: give at least 1.")
  if out:
    requirements.require("plots", f"--out={out}")
  # Measure every state of every run, and print its table.
  value_rows: list[Row] = []
  draws = states.Draws(workdirs, state, samples, length, split, seed)
  for draw in draws:
    ids = draw.batch["inputs"]
    spectra = isometry.measure_spectra(
      draw.run.model, draw.run.params, ids, steps=steps, seed=seed
    )
    value_rows += isometry.rows(draw.label, draw.seed, spectra)
    label = states.label(draw.folder, draw.state)
    print(f"{isometry.text(label, spectra)}\n", flush=True)
  # Print the caption, and draw the figure of all runs.
  name = Path(out or "isometry").name
  picture = isometry.figure(value_rows, draws.caption, name)
  print(picture.caption)
  if out:
    picture.write(Path(out).parent)
    print(f"\nWritten to {out}.csv, .png and .svg.")


if __name__ == "__main__":
  main()
