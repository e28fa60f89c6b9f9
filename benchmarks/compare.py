r"""Comparison of benchmark results with a baseline.

python -m benchmarks --out now.json && python -m benchmarks.compare now.json

The command compares ratios of calls timed in the same rounds, bytes, shares and
exponents, which depend little on the load of the machine. It prints every
figure that is worse than the baseline's by more than --allowed (0.15, as a
share of the baseline's figure), and then the exit status is 1. --seconds also
compares seconds; use it for two files from the same idle machine. --baseline
replaces the default file benchmarks/baseline.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.data import table
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError

Tables = dict[str, Any]  # Rows by title of the table; hardware and versions.

BASELINE = Path(__file__).with_name("baseline.json")
# First words of the titles of columns in which more is better, or less.
MORE = ("times", "of")
LESS = ("exponent", "GiB,", "MB,", "share")
SECONDS = {"s", "ms"}
KEYS = ("n", "batch")  # Columns of numbers that identify a row.
NO_TABLES = ("hardware", "versions")


def name_of(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
  """Returns the columns and values that identify a row of a table."""
  columns = row.items()
  return tuple((k, v) for k, v in columns if k in KEYS or isinstance(v, str))


def more_is_better(column: str, *, seconds: bool) -> bool | None:
  """Returns True if larger figures of a column are better.

  Args:
    column: title of the column.
    seconds: True to compare durations.

  Returns:
    True or False, or None if the column is not compared.
  """
  words = column.split()
  first, last = words[0], words[-1]
  if first in MORE:
    return True
  is_duration = seconds and {first, last} & SECONDS
  return False if first in LESS or is_duration else None


def compare(
  before: Tables, now: Tables, *, allowed: float, seconds: bool = False
) -> list[dict[str, Any]]:
  """Returns a row for each figure that is worse or missing, and each new row.

  Args:
    before: tables of the baseline, as `benchmarks.data.save` writes them.
    now: tables to compare, in the form of `before`.
    allowed: share of the baseline's figure by which a figure may be worse.
    seconds: True to compare durations as well.
  """
  report = []
  for title, rows in now.items():
    if title in NO_TABLES:
      continue
    # Find the row of the baseline for each row of a table.
    baseline = {name_of(row): row for row in before.get(title, [])}
    for name in baseline.keys() - {name_of(row) for row in rows}:
      label = ", ".join(str(value) for _, value in name)
      entry = {"table": title, "row": label, "figure": "the row"}
      report.append(entry | {"worse by": "missing"})
    for row in rows:
      name = name_of(row)
      label = ", ".join(str(value) for _, value in name)
      entry = {"table": title, "row": label}
      if name not in baseline:
        report.append(entry | {"figure": "a new row"})
        continue
      # Compare the figures of the baseline.
      for column, old in baseline[name].items():
        better = more_is_better(column, seconds=seconds)
        if better is None or not isinstance(old, float) or not old:
          continue
        value = float(row.get(column, math.nan))
        # Relative change; positive if the figure became worse, NaN without one.
        worse = (old - value if better else value - old) / old
        if not worse <= allowed:
          share = "missing" if math.isnan(worse) else f"{worse:.0%}"
          figures = {"figure": column, "before": old, "now": value}
          report.append(entry | figures | {"worse by": share})
  return report


def _read(path: Path) -> Tables:
  if not path.is_file():
    raise UserError(
      f"There is no file {path}: python -m benchmarks --out {path} writes it."
    )
  return json.loads(path.read_text())


@cli.command(
  cli.argument("now", type=Path, help="JSON file of python -m benchmarks"),
  cli.argument(
    "--baseline", default=BASELINE, help="JSON file of the baseline"
  ),
  cli.argument(
    "--allowed", default=0.15, help="share by which a figure may be worse"
  ),
  cli.switch("--seconds", help="compare seconds as well"),
)
def main(now: Path, baseline: Path, allowed: float, seconds: bool) -> None:
  """Prints the figures that became worse; the exit status is 1 if any did."""
  # Warn if the results come from different hardware.
  before, after = _read(baseline), _read(now)
  old, new = before["hardware"], after["hardware"]
  if old != new:
    print(f"The hardware differs: {old}, now {new}.\n")
  # Print the figures that became worse.
  worse = compare(before, after, allowed=allowed, seconds=seconds)
  print(table(worse) if worse else "Nothing became worse.")
  # A new row is printed, but it is not a failure.
  sys.exit(any("worse by" in row for row in worse))


if __name__ == "__main__":
  main()
