r"""Measures dynamical isometry: singular values of an encoder's Jacobian.

python -m jaxformers isometry runs/transject runs/transformer --out isometry
python -m jaxformers isometry runs/transformer --untrained

A map is a dynamical isometry if all singular values of its Jacobian are near 1:
no small change of its input grows or vanishes (TransJect, section 2; Pennington
et al. 2017, https://arxiv.org/abs/1711.04735). A Jacobian has all tokens of one
sequence: one Jacobian for each layer, and one for all layers from the embedding
on, without the norm that may end the encoder. In a layer's Jacobian, what an
earlier layer has handed on (TransJect's Sigma, NeuTRENO's values) is fixed.

A Jacobian of at most 2,048 rows (tokens times d) is computed whole and
decomposed, in one vector-Jacobian product a row. Of a larger one, --steps of
Lanczos bidiagonalization from a random vector estimate the distribution, in two
such products and one Jacobian-vector product a step, for all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.plotting import figures
from jaxformers.analysis.plotting.figures import Row
from jaxformers.analysis.tokens import isometry
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.errors import UserError
from jaxformers.models import capture as captures


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
  """Prints a table for each run, and draws the figure if asked.

  A run as it was trained, its untrained start, and its model with other weights
  or of another name are compared.
  """
  if steps < 1:
    raise UserError(f"--steps={steps}: give at least 1.")
  if out:
    requirements.require("plots", f"--out={out}")
  value_rows: list[Row] = []
  sizes, lengths = set(), set()
  for workdir in workdirs:
    for arguments in states.states(state):
      name = states.describe(arguments)
      label = ", ".join(filter(None, [str(workdir), name]))
      run = states.load(workdir, **arguments)
      ids = run.sample(samples, length, split, seed=seed)
      sizes.add(len(ids))
      lengths.add(captures.num_tokens(run.model, ids))
      spectra = isometry.measure_spectra(
        run.model, run.params, ids, steps=steps, seed=seed
      )
      value_rows += isometry.rows(label, 0, spectra)
      print(f"{isometry.text(label, spectra)}\n", flush=True)
  data = figures.describe_data(sizes, lengths, {1}, split)
  picture = isometry.figure(value_rows, data, Path(out or "isometry").name)
  print(picture.caption)
  if out:
    picture.write(Path(out).parent)
    print(f"\nWritten to {out}.csv, .png and .svg.")


if __name__ == "__main__":
  main()
