"""Builds the page of a report from the workdirs of runs."""

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
  """Returns the page of the runs in some folders.

  Args:
    workdirs: folders of runs, or folders that contain them.
    options: options of the measurements.
    checkpoints: True to load models; False for tables and training curves only.
    pretrained: folders of pre-trained models without a run.

  Raises:
    UserError: if there is neither a run nor a pre-trained model. The message
      lists the reasons.
  """
  requirements.require("plots", "The page of a report")
  # Group the runs, and note which runs are left out.
  records, notes = runs.discover(workdirs)
  if not records and not pretrained:
    raise UserError("\n".join([*notes, "Give the workdirs of runs."]))
  groups = runs.group_by_recipe(records)
  shown = [record for group in groups for record in group.runs]
  ended = [record.results for record in shown if record.results]
  page = Page(notes=notes + _notes(records, shown))
  # Add the tables and training curves, which need no model.
  if groups:
    page.rows = tables.summarise(ended)
    page.speeds = overview.speeds(groups)
    page.papers = published.tables(ended)
    page.add("Training", overview.training(groups))
    page.add("Training", overview.over_minutes(groups))
    page.add("Training", overview.by_length(groups))
    page.add("Training", overview.by_state(groups))
    page.add("Training", overview.matrix(groups))
    page.add("Training", overview.sizes(groups))
  # Leave out this figure if the runs cannot be compared.
  try:
    page.add("Depth and width", overview.depth_against_width(groups))
  except UserError as error:
    page.notes.append(f"No figure of depth against width: {error}")
  # Load the models for the figures of layers.
  if checkpoints:
    measured.add(page, groups, options, pretrained)
  return page


def _notes(
  records: Sequence[runs.RunRecord], shown: Sequence[runs.RunRecord]
) -> list[str]:
  """Returns a note for each run that is left out, damaged or incomplete."""
  # A record that is in no group repeats the recipe and seed of another run.
  notes = [
    f"{record.folder} repeats the recipe and seed of another run, and is left "
    "out."
    for record in records
    if not any(record is other for other in shown)
  ]
  notes += [
    f"{record.folder} has no results.json: the run has not ended, and is not "
    "in the table."
    for record in records
    if not record.results
  ]
  # Note damaged checkpoints and damaged training curves.
  for record in shown:
    if "damaged_best_step" in record.results:
      damage = tables.describe_damage(record.results)
      notes.append(f"{record.folder}: {damage}")
    if record.metrics_problem:
      # An unreadable file leaves no records to draw.
      curves = " Curves show the lines that remain." if record.metrics else ""
      notes.append(record.metrics_problem + curves)
  return notes
