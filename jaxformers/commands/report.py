r"""Writes a page with the tables and figures of runs.

jaxformers report runs/transject runs/local --out report
jaxformers report --pretrained PATH/bert-base-uncased --out report

The page report/index.html needs no server and no network. Every figure is also
written to the folder as PNG, SVG and CSV. A WORKDIR is a run, or a folder with
runs below it. Runs that differ only in the seed form one row, with mean and
standard deviation. The page lists figures that could not be drawn, with the
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.page import report
from jaxformers.analysis.page.measured import Options
from jaxformers.analysis.page.page import Page, write
from jaxformers.analysis.page.texts import TEXT
from jaxformers.analysis.tables import results as tables
from jaxformers.analysis.tokens import entropy
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose


@cli.command(
  cli.argument(
    "workdirs",
    nargs="*",
    type=Path,
    metavar="WORKDIR",
    help="folder of a run, or a folder with runs below it",
  ),
  cli.option(
    "pretrained",
    "",
    "folders of BERT models from Hugging Face, which have no run, for the "
    "figures of single tokens: a,b",
  ),
  cli.option("out", Path("report"), "folder of the page"),
  cli.option("samples", 32, "number of test samples"),
  cli.option("length", 512, "largest number of tokens per sample"),
  cli.option(
    "estimator",
    "vasicek",
    f"estimator of the entropy: {', '.join(entropy.ESTIMATORS)}",
  ),
  cli.option("axis", "units", f"axis of entropy: {', '.join(entropy.AXES)}"),
  cli.option("text", "", f"text to draw token by token (default: {TEXT!r})"),
  cli.option("tokens", "", "words of --text to label in the figures: a,b"),
  cli.switch(
    "--no_checkpoints", help="load no models: tables and training curves only"
  ),
)
def main(
  workdirs: Sequence[Path],
  out: Path,
  tokens: str,
  pretrained: str,
  no_checkpoints: bool,
  **measurement: Any,
) -> None:
  """Writes the page, and prints the table of results."""
  # Check the arguments before the measurements.
  options = Options(**measurement, named=tuple(cli.names(tokens)))
  choose("estimator", options.estimator, entropy.ESTIMATORS)
  choose("axis", options.axis, entropy.AXES)
  if options.samples < 1 or options.length < 1:
    raise UserError(
      f"--samples={options.samples} --length={options.length}: give at least 1 "
      "of each."
    )
  # Pretrained models need checkpoints.
  folders = [Path(name) for name in cli.names(pretrained)]
  if folders and no_checkpoints:
    raise UserError(
      f"--pretrained={pretrained} needs models, and --no_checkpoints loads "
      "none: remove one of the two options."
    )
  requirements.require("plots", "The page of a report")
  # Create the folder now: an error ends the command before the measurements.
  is_new = not out.exists()
  out.mkdir(parents=True, exist_ok=True)
  # Measure the models, and remove a new empty folder after an error.
  try:
    page = report.build_page(
      workdirs, options, checkpoints=not no_checkpoints, pretrained=folders
    )
  except UserError:
    if is_new:
      out.rmdir()
    raise
  path = write(page, out)
  _print_tables(page)
  print(f"Written to {path}.")


def _print_tables(page: Page) -> None:
  """Prints the tables of a page, and its notes on missing figures."""
  if page.rows:
    print(tables.markdown(page.rows))
  if page.entropies:
    print(f"\n{page.entropies}\n")
  for note in page.notes:
    print(f"Note: {note}")


if __name__ == "__main__":
  main()
