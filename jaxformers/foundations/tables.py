"""Tables in Markdown, and their cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence


def markdown_table(
  header: Sequence[object],
  rows: Iterable[Sequence[object]],
  right: Iterable[int] = (),
) -> str:
  """Returns a Markdown table.

  Bars, line ends and tags inside of cells are shown as they are written.

  Args:
    header: titles of the columns.
    rows: cells of each line, one for each column.
    right: indices of the columns that are aligned to the right.
  """
  right = set(right)
  rules = ["---:" if k in right else "---" for k in range(len(header))]
  head, *body = ([_escape(cell) for cell in cells] for cells in [header, *rows])
  lines = [head, rules, *body]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape(cell: object) -> str:
  """Returns a cell whose text ends neither the cell nor the table."""
  text = " ".join(str(cell).splitlines()).replace("&", "&amp;")
  return text.replace("|", r"\|").replace("<", "&lt;")


def split_cells(line: str) -> list[str]:
  """Returns the cells of a line of `markdown_table`, as they were given."""
  inner = line.removeprefix("| ").removesuffix(" |")
  return [
    cell.replace(r"\|", "|").replace("&lt;", "<").replace("&amp;", "&")
    for cell in inner.split(" | ")
  ]


def spread(values: Collection[float]) -> tuple[float, float]:
  """Returns mean and sample deviation; the deviation of one value is NaN."""
  deviation = statistics.stdev(values) if len(values) > 1 else math.nan
  return statistics.mean(values), deviation


def plus_minus(
  mean: float, deviation: float, digits: int = 2, sign: str = "+-"
) -> str:
  """Returns "1.23 +- 0.45", or the mean alone if there is no deviation."""
  bar = "" if math.isnan(deviation) else f" {sign} {deviation:.{digits}f}"
  return f"{mean:.{digits}f}{bar}"


def format_score(metric: str, value: float) -> str:
  """Returns a score as text: perplexity and error unchanged, or in percent."""
  digits = {"perplexity": 2, "error": 4}.get(metric)
  return f"{value:.2%}" if digits is None else f"{value:.{digits}f}"
