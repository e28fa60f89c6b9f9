r"""What became slower or larger since a baseline.

python -m benchmarks --out now.json && python -m benchmarks.compare now.json

Judges what does not depend on how busy the machine was: ratios of a round,
planned bytes and exponents. One that is worse than the baseline's by more than
--allowed, 0.15 of it, is shown, and the exit status is 1. Seconds are judged
with --seconds, for two files of one quiet machine. --baseline names another
file than benchmarks/baseline.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.data import table
from jaxformers import cli
from jaxformers.errors import UserError

BASELINE = Path(__file__).with_name("baseline.json")
# By the first word of a column: whether more is better.
JUDGED = {
  "times": True,
  "of": True,
  "exponent": False,
  "GiB,": False,
  "MB,": False,
  "share": False,
}
SECONDS = ("s", "ms")
SAME = ("n", "batch")  # Numbers that say which row it is.
APART = ("hardware", "versions")


def name_of(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
  """What tells a row from the others of its table."""
  return tuple(
    (key, value)
    for key, value in row.items()
    if key in SAME or isinstance(value, str)
  )


def more_is_better(column: str, *, seconds: bool) -> bool | None:
  """Whether more is better in a column; None if it is not judged.

  Args:
    column: its title.
    seconds: whether durations are judged.
  """
  words = column.split()
  if words[0] in JUDGED:
    return JUDGED[words[0]]
  if seconds and (words[0] in SECONDS or words[-1] in SECONDS):
    return False
  return None


def compare(
  before: dict[str, Any],
  now: dict[str, Any],
  *,
  allowed: float,
  seconds: bool = False,
) -> list[dict[str, Any]]:
  """What is worse in `now`, and what of its tables the baseline lacks.

  Args:
    before, now: as `benchmarks.data.save` writes them.
    allowed: by what share of the baseline's a figure may be worse.
    seconds: whether durations are judged as well.

  Returns:
    A row for each figure that is worse, and for each row that is new.
  """
  found = []
  for title, rows in now.items():
    if title in APART:
      continue
    known = {name_of(row): row for row in before.get(title, [])}
    for row in rows:
      name = name_of(row)
      label = ", ".join(str(value) for _, value in name)
      if name not in known:
        found.append({"table": title, "row": label, "figure": "a new row"})
        continue
      for column, value in row.items():
        better = more_is_better(column, seconds=seconds)
        old = known[name].get(column)
        if better is None or not isinstance(value, float) or not old:
          continue
        worse = (old - value if better else value - old) / old
        if worse > allowed:
          found.append(
            {
              "table": title,
              "row": label,
              "figure": column,
              "before": float(old),
              "now": value,
              "worse by": f"{worse:.0%}",
            }
          )
  return found


def _read(path: Path) -> dict[str, Any]:
  if not path.is_file():
    raise UserError(
      f"{path} is no file: python -m benchmarks --out {path} makes it."
    )
  return json.loads(path.read_text())


@cli.command(
  cli.argument("now", type=Path, help="JSON of python -m benchmarks"),
  cli.argument("--baseline", default=BASELINE, help="JSON to compare with"),
  cli.argument(
    "--allowed", default=0.15, help="share by which a figure may be worse"
  ),
  cli.switch("--seconds", help="judge seconds, too"),
)
def main(now: Path, baseline: Path, allowed: float, seconds: bool) -> None:
  """Prints what became worse; the exit status is 1 if anything did."""
  before, after = _read(baseline), _read(now)
  if before["hardware"] != after["hardware"]:
    print(
      f"Of other hardware: {before['hardware']}, now {after['hardware']}.\n"
    )
  worse = compare(before, after, allowed=allowed, seconds=seconds)
  print(table(worse) if worse else "Nothing became worse.")
  sys.exit(any("worse by" in row for row in worse))


if __name__ == "__main__":
  main()
