r"""Prints the tables of the papers, with the scores of our runs added.

jaxformers published runs/* [--latex]

The tables are TransJect's tables 1 and 2, and the tables of Long Range Arena,
S4, S5, Mega and NeuTRENO (`papers.py`). Each row of ours is a model with its
sizes under a protocol. The difference from the paper is also given in standard
errors. They combine the spread of our seeds, the spread of the paper's runs if
the paper prints it, and, for accuracies, the sampling error of the test
examples on both sides. The difference is printed only if a run has the
protocol, the training length, the test examples and the options of the
published number, and if its score was computed in the same way. Otherwise a
star replaces the difference, and the reason is printed below the table.

Some scores are computed after training by other commands: `segmentation`
(sliding windows), `perplexity` (windows with a stride of one token),
`smoothness` and `robustness`. These commands write them to `scores.json` in the
workdir of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxformers.analysis.tables import published, results
from jaxformers.analysis.tables.papers import TABLES
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError


@cli.command(
  cli.WORKDIRS,
  cli.switch("--latex", dest="use_latex", help="print LaTeX tabulars"),
)
def main(workdirs: Sequence[Path], use_latex: bool) -> None:
  """Prints the tables of the papers that include tasks of the runs."""
  filled = published.tables(results.read_runs(workdirs))
  # Without any table, list the tasks that have one.
  if not filled:
    names = {column.task for table in TABLES for column in table.columns}
    raise UserError(
      "no run has a task of the papers' tables: train one of "
      f"{', '.join(sorted(names))}."
    )
  print(published.text(filled, use_latex=use_latex))


if __name__ == "__main__":
  main()
