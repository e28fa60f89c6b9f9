r"""Writes one page with the tables and figures of any runs.

python -m jaxformers report runs/transject runs/local --out report
python -m jaxformers report --pretrained PATH/bert-base-uncased --out report

Writes report/index.html, which needs no server and no network, and every figure
beside it as PNG, SVG and CSV. A WORKDIR is a run, or has runs below it. Runs
that differ only in the seed form one row, with mean and deviation. Figures that
cannot be drawn are named on the page with the reason, and the others are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.page import measured, overview
from jaxformers.analysis.page.measured import Options
from jaxformers.analysis.page.page import Page, write
from jaxformers.analysis.page.texts import TEXT
from jaxformers.analysis.tables import published, runs
from jaxformers.analysis.tables import results as tables
from jaxformers.analysis.tokens import entropy
from jaxformers.commands import cli
from jaxformers.foundations import requirements
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose


def build(
  workdirs: Sequence[Path],
  options: Options,
  *,
  checkpoints: bool = True,
  pretrained: Sequence[Path] = (),
) -> Page:
  """Returns the page of some folders.

  Args:
    workdirs: runs, or folders with runs below.
    options: options of the measurements.
    checkpoints: True to load models; False for tables and curves alone.
    pretrained: folders of pre-trained models without a run.

  Raises:
    UserError: if there is neither a run nor a pre-trained model; lists the
      reasons.
  """
  requirements.require("plots", "The page of a report")
  # Group the runs, and note which are left out.
  records, notes = runs.discover(workdirs)
  if not records and not pretrained:
    raise UserError("\n".join([*notes, "Give the workdirs of runs."]))
  groups = runs.group_by_recipe(records)
  shown = [record for group in groups for record in group.runs]
  ended = [record.results for record in shown if record.results]
  page = Page(notes=notes + _notes(records, shown))
  # Tables and curves need no model.
  if groups:
    page.rows = tables.summarise(ended)
    page.speeds = overview.speeds(groups)
    page.papers = published.tables(ended)
    page.add("Training", overview.training(groups))
    page.add("Training", overview.sizes(groups))
  # If runs cannot be compared, leave out only this figure.
  try:
    page.add("Depth and width", overview.depth_against_width(groups))
  except UserError as error:
    page.notes.append(f"No figure of depth against width: {error}")
  # Only the figures of layers load models.
  if checkpoints:
    measured.add(page, groups, options, pretrained)
  return page


def _notes(
  records: Sequence[runs.RunRecord], shown: Sequence[runs.RunRecord]
) -> list[str]:
  """Returns a note for each run that is left out, damaged or not complete."""
  # A record that is in no group repeats the recipe and seed of another.
  notes = [
    f"{record.folder} repeats the recipe and seed of another run, and is left "
    "out."
    for record in records
    if not any(record is other for other in shown)
  ]
  notes += [
    f"{record.folder} has no results.json: it has not ended, and is not in the "
    "table."
    for record in records
    if not record.results
  ]
  for record in shown:
    if "damaged_best_step" in record.results:
      damage = tables.describe_damage(record.results)
      notes.append(f"{record.folder}: {damage}")
    if record.metrics_problem:
      # Curves need a record: a file that cannot be read has none.
      curves = " Curves show the lines that remain." if record.metrics else ""
      notes.append(record.metrics_problem + curves)
  return notes


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
    "folders of BERT from Hugging Face without a run, for the figures of "
    "single tokens: a,b",
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
  options = Options(**measurement, named=tuple(cli.names(tokens)))
  choose("estimator", options.estimator, entropy.ESTIMATORS)
  choose("axis", options.axis, entropy.AXES)
  if options.samples < 1 or options.length < 1:
    raise UserError(
      f"--samples={options.samples} --length={options.length}: give at least 1 "
      "of each."
    )
  folders = [Path(name) for name in cli.names(pretrained)]
  if folders and no_checkpoints:
    raise UserError(
      f"--pretrained={pretrained} needs models, and --no_checkpoints loads "
      "none: leave out one of the two."
    )
  requirements.require("plots", "The page of a report")
  # A folder that cannot be written ends the command before the measurements.
  is_new = not out.exists()
  out.mkdir(parents=True, exist_ok=True)
  try:
    page = build(
      workdirs, options, checkpoints=not no_checkpoints, pretrained=folders
    )
  except UserError:
    if is_new:
      out.rmdir()
    raise
  path = write(page, out)
  if page.rows:
    print(tables.markdown(page.rows))
  if page.entropies:
    print(f"\n{page.entropies}\n")
  for note in page.notes:
    print(f"Note: {note}")
  print(f"Written to {path}.")


if __name__ == "__main__":
  main()
