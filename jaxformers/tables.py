"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(
  header: Sequence[object],
  rows: Iterable[Sequence[object]],
  right: Iterable[int] = (),
) -> str:
  """Returns a Markdown table.

  Args:
    header: titles of the columns.
    rows: cells of each line, one for each column.
    right: indices of the columns that are aligned to the right.
  """
  right = set(right)
  rules = ["---:" if k in right else "---" for k in range(len(header))]
  lines = [header, rules, *rows]
  return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
