"""The matrix of diagnostics: what each encoder has learned, and could learn."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxformers.analysis.tables import results
from jaxformers.analysis.tables.results import Result
from jaxformers.foundations.tables import markdown_table
from jaxformers.models import MODELS

# Metric of a task in the matrix.
METRICS = {"state_tracking": "sequence_accuracy", "recall": "accuracy"}
CAN, CANNOT, UNKNOWN = "can", "cannot", "unknown"
# Reasons, with their sources.
REASONS = {
  "signed": "a factor of -1 counts modulo 2 (Grazzi et al. 2025)",
  "positive": "factors in [0, 1] do not count modulo 2 for all lengths "
  "(Grazzi et al. 2025)",
  "real": "real factors do not count modulo 3 for all lengths "
  "(Grazzi et al. 2025)",
  "constant": "factors that do not depend on tokens do not count modulo m for "
  "all lengths (Sarrof et al. 2024)",
  "circuits": "products in A5 need circuits whose depth grows, unless "
  "TC0 = NC1 (Merrill et al. 2024)",
  "attention": "weights exist, but none that training finds for all lengths "
  "(Hahn and Rofin 2024)",
  "lookup": "attention finds the value behind an equal key (Arora et al. 2023)",
  "state": "a state of fixed size holds a limited number of pairs "
  "(Arora et al. 2024)",
}
# Problems whose groups contain a cycle of three, or are not solvable.
_THREE = ("Z3", "S3", "S4", "A4")
_PERFECT = ("A5", "S5")
# Mixers: attention to all tokens; recurrences whose factors are 1 or constant,
# and those whose real factors depend on tokens.
_EXACT = ("softmax", "kernelized")
_SUMS = ("linear", "performer")
_CONSTANT = ("s4d", "s5", "lru", "allpass")
_SELECTIVE = ("mamba", "rglru")


def expected(config: Mapping[str, Any]) -> tuple[str, str]:
  """Returns what theory says of a run, and the key of the reason.

  The statements are about all lengths, with numbers of fixed precision, and a
  number of layers that does not grow.

  Args:
    config: config of the run, as in `results.json`.

  Returns:
    `CAN`, `CANNOT` or `UNKNOWN`; and a key of `REASONS`, or "".
  """
  model, task = config["model"], config["task"]
  mixer, problem = MODELS[model["name"]].mixer, task["problem"]
  has_state = mixer in (*_SUMS, *_CONSTANT, *_SELECTIVE)
  if task["name"] == "recall":
    if mixer in _EXACT:
      return CAN, "lookup"
    return UNKNOWN, "state" if has_state else ""
  if problem in _PERFECT and (has_state or mixer in _EXACT):
    return CANNOT, "circuits"
  # Coupled layers apply the mixer to half of the channels: nothing is known.
  if model.get("coupled") or not (has_state or mixer in _EXACT):
    return UNKNOWN, ""
  if mixer in _EXACT:
    return UNKNOWN, "attention"
  if mixer in _CONSTANT:
    return CANNOT, "constant"
  if problem in _THREE:
    return CANNOT, "real"
  is_signed = model.get("mixer", {}).get("signed", False)
  return (CAN, "signed") if is_signed else (CANNOT, "positive")


def row_name(config: Mapping[str, Any]) -> str:
  """Returns the name of an encoder, with the options that decide."""
  model = config["model"]
  name = str(model["name"])
  if model.get("mixer", {}).get("signed"):
    name += ", signed"
  if model.get("coupled"):
    name += ", coupled"
  if not config["task"].get("causal", True):
    name += " (both sides)"
  return name


def column_name(config: Mapping[str, Any]) -> str:
  """Returns the name of a problem."""
  return str(config["task"]["problem"])


def _share(values: Iterable[float]) -> str:
  """Returns the median and the best of shares, in percent."""
  listed = sorted(100 * value for value in values)
  return f"{statistics.median(listed):.0f} ({listed[-1]:.0f})"


def cell(runs: Sequence[Result]) -> str:
  """Returns the scores of the seeds of one encoder and problem.

  The scores are those at the least and at the greatest test length, each as the
  median and, in brackets, the best over seeds.
  """
  first = runs[0]
  metric = METRICS[first["task"]]
  lengths = sorted(map(int, first["by_length"]))
  shown = [
    _share(run["by_length"][str(n)][metric] for run in runs)
    for n in (lengths[0], lengths[-1])
  ]
  says, _ = expected(first["config"])
  return f"{shown[0]}; {shown[1]}; {says}"


def matrix(finished: Sequence[Result]) -> str:
  """Returns the matrix of encoders and problems as Markdown, with reasons.

  Args:
    finished: contents of `results.json`; runs of other tasks are ignored.
  """
  groups: dict[tuple[str, str], list[Result]] = {}
  for seeds in results.by_seed(finished):
    runs = [run for run in seeds.values() if run["task"] in METRICS]
    if runs and runs[0].get("by_length"):
      config = runs[0]["config"]
      groups.setdefault((row_name(config), column_name(config)), []).extend(
        runs
      )
  if not groups:
    return ""
  columns = list(dict.fromkeys(column for _, column in groups))
  lines = [
    [
      row,
      *(cell(groups[row, c]) if (row, c) in groups else "" for c in columns),
    ]
    for row in dict.fromkeys(row for row, _ in groups)
  ]
  # Explain every reason that a cell has.
  reasons = dict.fromkeys(
    (row, column, *expected(runs[0]["config"]))
    for (row, column), runs in groups.items()
  )
  notes = [
    f"- {row}, {column}: {says}; {REASONS[key]}."
    for row, column, says, key in reasons
    if key
  ]
  lengths = {
    c: sorted(map(int, runs[0]["by_length"])) for (_, c), runs in groups.items()
  }
  header = [f"{c}, {lengths[c][0]}; {lengths[c][-1]} tokens" for c in columns]
  table = markdown_table(("encoder", *header), lines)
  what = (
    "Median (best) over seeds in percent at the least and at the greatest "
    "length, and what theory says for all lengths: of state tracking whole "
    "sequences that are right, of recall tokens."
  )
  return "\n\n".join([what, table, "\n".join(notes)])
