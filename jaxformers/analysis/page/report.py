"""One page with the tables and figures of any runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxformers.analysis.page import measured, overview
from jaxformers.analysis.page.measured import Options
from jaxformers.analysis.page.page import Page
from jaxformers.analysis.tables import published, runs
from jaxformers.analysis.tables import results as tables
from jaxformers.foundations import requirements
from jaxformers.foundations.errors import UserError


def build_page(
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
