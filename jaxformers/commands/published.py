r"""Prints the papers' tables with our runs beside their numbers.

python -m jaxformers published runs/* [--latex]

The tables are TransJect's 1 and 2, Long Range Arena's, those of S4, S5 and
Mega, and NeuTRENO's (`papers.py`). A row of ours is a model at its sizes under
a protocol. The difference to the paper is also given in standard errors, which
count the spread of our seeds, the spread of the paper's runs where it prints
one, and for accuracies the chance of the test examples on both sides. The
difference is given only where a run has the protocol, the training length, the
test examples and the options of the published number, and a score that was made
in the same way. Otherwise a star stands in its place, and the reason below the
table.

Some scores are not those that training ends with. They come from the
`scores.json` that `segmentation` (sliding windows), `perplexity` (a window that
moves by a word), `smoothness` and `robustness` write to a run's workdir.
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
  """Prints the papers' tables that have any of the runs."""
  filled = published.tables(results.read_runs(workdirs))
  if not filled:
    names = {column.task for table in TABLES for column in table.columns}
    raise UserError(
      "no run is of a task of the papers' tables: train one of "
      f"{', '.join(sorted(names))}."
    )
  print(published.text(filled, use_latex=use_latex))


if __name__ == "__main__":
  main()
