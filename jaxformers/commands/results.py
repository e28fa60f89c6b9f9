r"""Prints mean and deviation over seeds of many runs, a table for each metric.

python -m jaxformers results runs/*

Runs that differ in the seed alone are one row. Where a model has several rows
on a task, each names up to three fields in which they differ, and a second
table has the mean and deviation over these settings, if their data are the
same. A line below a table names the tasks whose rows differ in steps, batch
size, protocol or data, so that their scores do not compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxformers.analysis.tables import results
from jaxformers.foundations import cli


@cli.command(cli.WORKDIRS)
def main(workdirs: Sequence[Path]) -> None:
  """Prints the table of the runs below some folders."""
  print(results.markdown(results.summarise(results.read_runs(workdirs))))


if __name__ == "__main__":
  main()
