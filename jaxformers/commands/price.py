r"""Draws the test scores of runs over what their certificates guarantee.

python -m jaxformers price runs/text_narrow runs/text_wide --out price

For every run: the factors by which its encoder changes the distance of two
sequences at the least and at the most, the products over the layers of
`InvertibleLayers.certificate`; their ratio, the width of the certificate; and
the test score. Runs whose layers guarantee nothing of all sequences are listed
without. --out draws the score over the width.
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
  cli.option("out", "", "folder of price.png, .svg and .csv"),
)
def main(folders: list[Path], out: str) -> None:
  """Prints the table of the runs, and draws it if asked."""
  if out:
    requirements.require("plots", f"--out={out}")
  runs = [price.price(folder) for folder in folders]
  print(price.price_table(runs))
  if out:
    drawn = price.figure(runs)
    if not drawn.rows:
      raise UserError(
        "None of the runs has a certificate, so there is no curve to draw: "
        "leave out --out."
      )
    paths = drawn.write(Path(out))
    print(f"Written to {', '.join(map(str, paths))}.")


if __name__ == "__main__":
  main()
