r"""Compares the test scores of runs with their certified constants.

jaxformers price runs/text_narrow runs/text_wide --out price

For every run, the table lists the smallest and the largest factor by which its
encoder can change the distance of two sequences, and the distance: "sequences"
for the Frobenius norm, "farthest" for the greatest distance of two tokens. The
table also lists the test score. Runs whose layers have no certificate for all
sequences are listed without factors. --out draws the score over the largest
factor.
"""

from __future__ import annotations

from pathlib import Path

from jaxformers.analysis.certificates import price
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.errors import UserError


@cli.command(
  cli.argument(
    "folders", nargs="+", type=Path, metavar="WORKDIR", help="folder of a run"
  ),
  cli.option("out", "", "folder for price.png, .svg and .csv"),
)
def main(folders: list[Path], out: str) -> None:
  """Prints the table of the runs, and draws it if --out is set."""
  # Check for the plotting library before the computation.
  if out:
    requirements.require("plots", f"--out={out}")
  runs = [price.price(folder) for folder in folders]
  metrics = sorted({run.metric for run in runs})
  if len(metrics) > 1:
    raise UserError(
      f"The runs have scores in {' and '.join(metrics)}: give runs of one "
      "of them."
    )
  print(price.price_table(runs))
  if out:
    drawn = price.figure(runs)
    if not drawn.rows:
      raise UserError(
        "None of the runs has a certificate, so there is no curve to draw: "
        "remove --out."
      )
    paths = drawn.write(Path(out))
    print(f"Written to {', '.join(map(str, paths))}.")


if __name__ == "__main__":
  main()
