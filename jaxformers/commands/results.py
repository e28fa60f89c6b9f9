r"""Prints the mean and deviation of scores over seeds, by metric.

jaxformers results runs/*

Runs that differ only in the seed form one row. If a model has several rows for
a task, each row names up to three fields in which the rows differ. A second
table then has the mean and deviation over these settings, if their data are the
same. A line below each table names the tasks whose scores cannot be compared,
because their rows differ in steps, batch size, protocol or data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxformers.analysis.tables import results
from jaxformers.foundations import cli


@cli.command(cli.WORKDIRS)
def main(workdirs: Sequence[Path]) -> None:
  """Prints the tables of all runs in the given folders."""
  print(results.markdown(results.summarise(results.read_runs(workdirs))))


if __name__ == "__main__":
  main()
