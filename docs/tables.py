"""Tables of the README and docs/ that are made from results/*.jsonl.

    python docs/tables.py           writes the tables into the pages
    python docs/tables.py --check   fails if a page has another table

A line of a file is a record: one row of one table, with its config, protocol,
seeds, commit, hardware and minutes. A page names the table between two
comments, and this module writes the rows there:

    <!-- table: injective/text -->
    <!-- end of table -->

After the name, `mean` prints mean and sample deviation over seeds instead of a
list, and `transposed` exchanges rows and columns. Columns of several tables of
a file, whose rows have the same names, are joined by lines of the comment; a
name in brackets is written before the columns:

    <!-- join: programs
    v5e_listops_train (ListOps): GiB, static ms
    v5e_text_train (Text): GiB, static ms
    -->
    <!-- end of table -->

The model pages of the site take the rows of a model from the same records.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (
  "README.md",
  "docs/depth.md",
  "docs/devices.md",
  "docs/diagnostics.md",
  "docs/laptop.md",
  "docs/orthogonal.md",
  "docs/performance.md",
  "docs/programs.md",
  "docs/results.md",
)
MARKED = re.compile(
  r"(?<=<!-- table: )([\w/]+)((?: \w+)*) -->\n.*?(?=<!-- end of table -->)",
  re.S,
)
JOINED = re.compile(
  r"(?<=<!-- join: )(\w+)\n(.*?)\n-->\n.*?(?=<!-- end of table -->)", re.S
)
PART = re.compile(r"(\w+)(?: \(([^)]*)\))?: (.*)")
Record = dict[str, Any]


@functools.cache
def read(name: str) -> tuple[Record, ...]:
  """Returns the records of a table, FILE/TABLE, in their order.

  Raises:
    ValueError: there is no such table.
  """
  file, _, table = name.partition("/")
  lines = (ROOT / "results" / f"{file}.jsonl").read_text().splitlines()
  records = [r for r in map(json.loads, lines) if r["table"] == table]
  if not records:
    raise ValueError(f"results/{file}.jsonl has no table {table!r}.")
  return tuple(records)


def _decimals(value: Any) -> int:
  """Returns the number of decimals of the number or numbers in a cell."""
  if isinstance(value, float):
    return max(0, -int(Decimal(repr(value)).as_tuple().exponent))
  if isinstance(value, list):
    return max(map(_decimals, value))
  if isinstance(value, dict):
    return _decimals(value["mean"])
  return 0


def _format(value: Any, decimals: int, mean: bool) -> str:
  """Returns the text of a cell, with as many decimals as its column has."""
  if value is None:
    return ""
  if isinstance(value, dict) and not mean and "by_seed" in value:
    value = value["by_seed"]
  if isinstance(value, list):
    return ", ".join(_format(v, decimals, mean) for v in value)
  if isinstance(value, dict):
    return f"{value['mean']:.{decimals}f} ± {value['deviation']:.{decimals}f}"
  if isinstance(value, float):
    # Columns of many magnitudes keep the digits that were recorded.
    return f"{value:,.{decimals}f}" if decimals < 3 else repr(value)
  return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(
  records: Sequence[Record], mean: bool = False, transposed: bool = False
) -> str:
  """Returns the rows of a table in Markdown.

  Args:
    records: rows of one table.
    mean: print mean and deviation where scores by seed are recorded, too.
    transposed: print a row for each column of the table.
  """
  columns = list(dict.fromkeys(key for r in records for key in r["values"]))
  rows = [[r["values"].get(key) for key in columns] for r in records]
  if any(r["minutes"] is not None for r in records):
    columns.append("minutes")
    rows = [[*row, r["minutes"]] for row, r in zip(rows, records, strict=True)]
  places = [max(map(_decimals, column)) for column in zip(*rows, strict=True)]
  is_text = [
    any(isinstance(cell, str) and " to " not in cell for cell in column)
    for column in zip(*rows, strict=True)
  ]
  cells = [["", *columns]]
  for record, row in zip(records, rows, strict=True):
    texts = [_format(c, p, mean) for c, p in zip(row, places, strict=True)]
    cells.append([record["row"], *texts])
  if transposed:
    cells = [list(column) for column in zip(*cells, strict=True)]
    is_text = [False] * len(records)
  rule = ["---", *("---" if text else "---:" for text in is_text)]
  head, *body = cells
  return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def joined(file: str, lines: str) -> list[Record]:
  """Returns rows with the columns that the lines of a comment name."""
  rows: dict[str, Record] = {}
  for name, prefix, columns in PART.findall(lines):
    for record in read(f"{file}/{name}"):
      row = rows.setdefault(record["row"], record | {"values": {}})
      for column in columns.split(", "):
        key = f"{prefix}: {column}" if prefix else column
        row["values"][key] = record["values"].get(column)
  return list(rows.values())


def source(file: str, records: Sequence[Record]) -> str:
  """Returns the line below a table: its file, seeds, commits and hardware."""
  seeds = sorted({seed for record in records for seed in record["seeds"]})
  word = "seed" if len(seeds) == 1 else "seeds"
  parts = [f"{word} {', '.join(map(str, seeds))}"] if seeds else []
  listed = [c for r in records for c in r["commit"].split(", ")]
  commits = ", ".join(dict.fromkeys(listed))
  parts += [f"commit{'s' if ' ' in commits else ''} {commits}"]
  parts += dict.fromkeys(record["hardware"] for record in records)
  return f"*`results/{file}.jsonl`: {'; '.join(parts)}.*"


def fill(text: str) -> str:
  """Returns a page with the current rows between its comments."""

  def write(match: re.Match[str]) -> str:
    name, options = match[1], match[2]
    records, file = read(name), name.partition("/")[0]
    table = markdown(records, **dict.fromkeys(options.split(), True))
    return f"{name}{options} -->\n\n{table}\n\n{source(file, records)}\n\n"

  def join(match: re.Match[str]) -> str:
    file, lines = match[1], match[2]
    names = [name for name, *_ in PART.findall(lines)]
    records = [r for name in names for r in read(f"{file}/{name}")]
    table = markdown(joined(file, lines))
    return f"{file}\n{lines}\n-->\n\n{table}\n\n{source(file, records)}\n\n"

  return JOINED.sub(join, MARKED.sub(write, text))


def titled_tables(page: str) -> Iterator[tuple[str, str, str]]:
  """Yields the names of the tables of a page, with the heading above each.

  The third value is the name in brackets of a joined table; otherwise "".
  """
  title = file = ""
  for line in (ROOT / page).read_text().splitlines():
    if line.startswith("#"):
      title = line.lstrip("# ")
    if match := re.fullmatch(r"<!-- table: ([\w/]+)(?: \w+)* -->", line):
      yield match[1], title, ""
    # A comment that joins tables has a line for each of them.
    if match := re.fullmatch(r"<!-- join: (\w+)", line):
      file = match[1]
    elif line == "-->":
      file = ""
    elif file and (match := PART.fullmatch(line)):
      yield f"{file}/{match[1]}", title, match[2] or ""


def stale_pages() -> Iterator[tuple[Path, str]]:
  """Yields the pages whose tables differ from results/, with their new text."""
  for page in PAGES:
    path = ROOT / page
    text = path.read_text()
    if fill(text) != text:
      yield path, fill(text)


def main(arguments: Iterable[str]) -> None:
  """Writes the tables, or checks them."""
  stale = list(stale_pages())
  if "--check" in arguments:
    names = ", ".join(f"{path.name}" for path, _ in stale)
    sys.exit(f"{names}: run python docs/tables.py" if stale else 0)
  for path, text in stale:
    path.write_text(text)
    print(f"{path.name}: written")


if __name__ == "__main__":
  main(sys.argv[1:])
