"""Markdown tables, and numbers formatted for their cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence


def markdown_table(
  header: Sequence[object],
  rows: Iterable[Sequence[object]],
  right: Iterable[int] = (),
) -> str:
  """Formats a Markdown table.

  Vertical bars and tags inside cells are escaped. Line breaks become spaces.

  Args:
    header: titles of the columns.
    rows: cells of each row, one for each column.
    right: indices of the columns that are aligned to the right.
  """
  # Escape the cells, and put a rule between the header and the rows.
  right = set(right)
  rules = ["---:" if k in right else "---" for k in range(len(header))]
  head, *body = ([_escape(cell) for cell in cells] for cells in [header, *rows])
  lines = [head, rules, *body]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape(cell: object) -> str:
  """Escapes the text of a cell, so that it ends neither cell nor table."""
  text = " ".join(str(cell).splitlines()).replace("&", "&amp;")
  return text.replace("|", r"\|").replace("<", "&lt;")


def split_cells(line: str) -> list[str]:
  """Returns the unescaped cells of a line of `markdown_table`."""
  inner = line.removeprefix("| ").removesuffix(" |")
  return [
    cell.replace(r"\|", "|").replace("&lt;", "<").replace("&amp;", "&")
    for cell in inner.split(" | ")
  ]


def spread(values: Collection[float]) -> tuple[float, float]:
  """Returns the mean and the sample standard deviation of values.

  The deviation of a single value is NaN.
  """
  deviation = statistics.stdev(values) if len(values) > 1 else math.nan
  return statistics.mean(values), deviation


def plus_minus(
  mean: float, deviation: float, digits: int = 2, sign: str = "+-"
) -> str:
  """Formats a mean and a deviation as "1.23 +- 0.45".

  If the deviation is NaN, only the mean is shown.
  """
  bar = "" if math.isnan(deviation) else f" {sign} {deviation:.{digits}f}"
  return f"{mean:.{digits}f}{bar}"


def format_score(metric: str, value: float) -> str:
  """Formats a score: perplexity and error as numbers, other metrics in %."""
  digits = {"perplexity": 2, "error": 4}.get(metric)
  return f"{value:.2%}" if digits is None else f"{value:.{digits}f}"
