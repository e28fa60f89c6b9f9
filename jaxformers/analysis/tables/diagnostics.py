"""Tables of diagnostics: encoders by problems, and the scores of MAD."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxformers import config as configs
from jaxformers.analysis.tables import results
from jaxformers.analysis.tables.results import Result
from jaxformers.foundations.tables import markdown_table
from jaxformers.models import MODELS
from jaxformers.tasks import mad

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
  "reflections": "a product of r reflections is an orthogonal matrix that "
  "depends on the token, and a rotation for even r (Siems et al. 2025)",
  "automata": "LSTM and GRU that are wide enough follow every finite "
  "automaton: a unit with saturated gates for each pair of state and symbol",
  "circuits": "products in A5 need circuits whose depth grows, unless "
  "TC0 = NC1 (Merrill et al. 2024)",
  "attention": "constructions exist with other positions and numbers, but "
  "training does not find them for all lengths (Hahn and Rofin 2024)",
  "lookup": "two layers of attention with positions find the value behind an "
  "equal key, at a given length (Arora et al. 2023)",
  "state": "a state of fixed size holds a limited number of pairs "
  "(Arora et al. 2024)",
}
# Problems for which theory is known to this module: two counts, and groups
# with a cycle of three of which only the last is not solvable.
_TWO, _THREE, _PERFECT = ("Z2",), ("Z3", "S3", "S4", "A4"), ("A5", "S5")
# Mixers: recurrences whose factors are 1 or constant, and recurrences whose
# real factors depend on tokens.
_SUMS = ("linear", "performer")
_CONSTANT = ("s4d", "s5", "lru", "linoss", "allpass", "retnet")
_SELECTIVE = ("mamba", "rglru", "mamba2", "gla", "hgrn2", "mlstm", "mingru")
# Mixers whose states are no linear functions of earlier states.
_NONLINEAR = ("lstm", "gru")
# Reflections per token with which one layer of the delta rule follows a group:
# A4, S4 and A5 are groups of rotations of three dimensions.
_REFLECTIONS = {"Z2": 1, "Z3": 2, "S3": 2, "A4": 2, "S4": 2, "A5": 2, "S5": 4}


def expected(config: Mapping[str, Any]) -> tuple[str, str]:
  """Returns what theory says of a run, and the key of the reason.

  The statements on state tracking are about all lengths and a number of layers
  that does not grow. `CANNOT` is for numbers of fixed precision. `CAN` is for
  layers that are wide enough, and for reflections also for exact numbers:
  their rounding errors add up with the length.

  Args:
    config: config of the run, as in `results.json`.

  Returns:
    `CAN`, `CANNOT` or `UNKNOWN`; and a key of `REASONS`, or "".
  """
  model, task = config["model"], config["task"]
  name = model["name"]
  mixer, options = _options(model)
  is_linear = mixer in (*_SUMS, *_CONSTANT, *_SELECTIVE)
  has_state = is_linear or mixer in ("delta", *_NONLINEAR)
  is_attention = mixer == "softmax" and name != "symmetric_transformer"
  # Coupled layers apply the mixer to half of the channels: nothing is known.
  if model.get("coupled"):
    return UNKNOWN, ""
  if task["name"] == "recall":
    is_deep = model.get("num_layers", 0) > 1 and task.get("causal", True)
    has_positions = options.get("rotary") or model.get("positions") != "none"
    if is_attention and is_deep and has_positions:
      return CAN, "lookup"
    return UNKNOWN, "state" if has_state else ""
  problem = task["problem"]
  if problem not in (*_TWO, *_THREE, *_PERFECT):
    return UNKNOWN, ""
  if mixer in _NONLINEAR:
    return CAN, "automata"
  if mixer == "delta":
    return _expected_of_delta(problem, options)
  if problem in _PERFECT and (is_linear or is_attention):
    return CANNOT, "circuits"
  if is_attention:
    return UNKNOWN, "attention" if problem in _TWO else ""
  if not is_linear:
    return UNKNOWN, ""
  if mixer in (*_SUMS, *_CONSTANT):
    return CANNOT, "constant"
  if problem in _THREE:
    return CANNOT, "real"
  return (CAN, "signed") if options.get("signed") else (CANNOT, "positive")


def _options(model: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
  """Returns the mixer of a model, "" for an unknown model, and its options."""
  options = model.get("mixer", {})
  if model["name"] not in MODELS:
    return "", dict(options)
  variant = MODELS[model["name"]]
  return variant.mixer, {**variant.defaults, **options, **variant.fixed}


def _expected_of_delta(
  problem: str, options: Mapping[str, Any]
) -> tuple[str, str]:
  """Returns what theory says of the delta rule on a group; see `expected`."""
  # Nothing is known of models in which every factor is a reflection.
  if options.get("reflect"):
    return UNKNOWN, ""
  if options.get("signed"):
    writes = options.get("num_householder", 1)
    is_enough = writes >= _REFLECTIONS[problem] and not options.get("head_dim")
    return (CAN, "reflections") if is_enough else (UNKNOWN, "")
  # For strengths up to 1 a factor that keeps the norm of a vector keeps the
  # vector, so that a product has no eigenvalue of modulus 1 other than 1.
  if problem in _TWO:
    return CANNOT, "positive"
  return UNKNOWN, ""


# Labels of rows, and the fields of a model that they stand for.
LABELS: dict[str, dict[str, Any]] = {
  "signed": {"mixer.signed": True},
  "no decay or convolution": {"mixer.forget": False, "mixer.conv_width": 0},
  "coupled": {"coupled": True},
}


def _deciding(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
  """Returns the labels of a run with the fields of its model they stand for."""
  model = config["model"]
  fields = model | {f"mixer.{k}": v for k, v in model.get("mixer", {}).items()}
  return [
    (label, wanted)
    for label, wanted in LABELS.items()
    if all(k in fields and fields[k] == v for k, v in wanted.items())
  ]


def overrides(config: Mapping[str, Any]) -> list[str]:
  """Returns the arguments that give a model the options of its row."""
  return [
    f"--config.model.{name}={value}"
    for _, fields in _deciding(config)
    for name, value in fields.items()
  ]


def row_name(config: Mapping[str, Any]) -> str:
  """Returns the name of an encoder, with the options that decide."""
  name = str(config["model"]["name"])
  for label, _ in _deciding(config):
    name += f", {label}"
  if not config["task"].get("causal", True):
    name += " (both sides)"
  return name


def problem_name(run: Result) -> str:
  """Returns the name of a problem, with its protocol if it is a paper's."""
  task = run["config"]["task"]
  protocol = task.get("protocol", "jaxformers")
  return str(task["problem"]) + f" ({protocol})" * (protocol != "jaxformers")


def column_name(run: Result) -> str:
  """Returns the name of a problem with the least length of its tests."""
  return f"{problem_name(run)}, {_lengths(run)[0]} tokens"


def _share(values: Iterable[float]) -> str:
  """Returns the median of shares in percent, and the best of several."""
  listed = sorted(100 * value for value in values)
  best = f" ({listed[-1]:.0f})" if len(listed) > 1 else ""
  return f"{statistics.median(listed):.0f}{best}"


def _lengths(run: Result) -> list[int]:
  """Returns the least test length, and four times it or else the greatest.

  This is one length if there is only one.
  """
  tested = sorted(map(int, run["by_length"]))
  long = 4 * tested[0] if 4 * tested[0] in tested else tested[-1]
  return [tested[0], *([long] if long > tested[0] else [])]


def cell(runs: Sequence[Result]) -> str:
  """Returns the scores of the seeds of one recipe, and what theory says.

  The scores are the median and, in brackets, the best over seeds, in percent,
  for each of `_lengths`.
  """
  metric = METRICS[runs[0]["task"]]
  shown = [
    _share(run["by_length"][str(n)][metric] for run in runs)
    for n in _lengths(runs[0])
  ]
  return "; ".join([*shown, expected(runs[0]["config"])[0]])


Cells = dict[str, list[Result]]  # Runs of the seeds, by column.


def _agreements(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns what the runs of a row of the matrix have in common.

  These are options of the model, except for sizes and positions, which depend
  on the task; and within a task and protocol all options of the model, the
  optimiser and the learning rate.
  """
  task, flat = config["task"], configs.flatten(config)
  # Sections without options are empty.
  model = {k: v for k, v in flat.items() if k.startswith("model.") and v != {}}
  by_task = ("d_model", "positions", "rotary", *results.DERIVED_OPTIONS)
  shared = {k: v for k, v in model.items() if not k.endswith(by_task)}
  fields = ("optimizer.", "schedule.learning_rate", "batch_size")
  training = {k: v for k, v in flat.items() if k.startswith(fields)}
  protocol = task.get("protocol", "jaxformers")
  return {
    "": json.dumps(shared, sort_keys=True),
    f"{task['name']}, {protocol}": json.dumps(model | training, sort_keys=True),
  }


def rows_of(finished: Sequence[Result]) -> list[tuple[str, Cells]]:
  """Returns the rows of the matrix: the name of an encoder, and its runs.

  Recipes of one encoder that differ in other fields have a row each. Recipes of
  different tasks share a row if their models differ only in width and
  positions.

  Args:
    finished: contents of `results.json`; runs of other tasks are ignored.
  """
  rows: list[tuple[str, Cells, dict[str, str]]] = []
  for seeds in results.by_seed(finished):
    runs = list(seeds.values())
    if runs[0]["task"] not in METRICS or not runs[0].get("by_length"):
      continue
    config = runs[0]["config"]
    name, column = row_name(config), column_name(runs[0])
    wanted = _agreements(config)
    # Find a row of this encoder that agrees and whose cell is free, or add one.
    fitting = (
      (row, cells, agreed)
      for row, cells, agreed in rows
      if row == name
      and column not in cells
      and all(agreed.get(k, text) == text for k, text in wanted.items())
    )
    entry = next(fitting, None)
    if entry is None:
      entry = (name, {}, {})
      rows.append(entry)
    entry[1][column] = runs
    entry[2].update(wanted)
  return [(name, cells) for name, cells, _ in rows]


def scores(runs: Sequence[Result]) -> list[tuple[int, float]]:
  """Returns the lengths of a cell, and the median score in percent."""
  metric = METRICS[runs[0]["task"]]
  return [
    (
      n,
      statistics.median(100 * run["by_length"][str(n)][metric] for run in runs),
    )
    for n in _lengths(runs[0])
  ]


def _reasons(rows: Sequence[tuple[str, Cells]]) -> list[str]:
  """Returns a line for each reason, with its encoders and problems."""
  reasons: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
  for name, cells in rows:
    for runs in cells.values():
      config = runs[0]["config"]
      says, key = expected(config)
      if key:
        names, problems = reasons.setdefault((says, key), ({}, {}))
        names[name] = problems[config["task"]["problem"]] = None
  return [
    f"- {says}: {REASONS[key]}: {', '.join(names)} on {', '.join(problems)}."
    for (says, key), (names, problems) in reasons.items()
  ]


def matrix(finished: Sequence[Result]) -> str:
  """Returns the matrix of encoders and problems as Markdown, with reasons.

  Args:
    finished: contents of `results.json`; runs of other tasks are ignored.
  """
  rows = rows_of(finished)
  if not rows:
    return ""
  columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
  lines = [
    [name, *(cell(cells[c]) if c in cells else "" for c in columns)]
    for name, cells in rows
  ]
  every = [run for _, cells in rows for runs in cells.values() for run in runs]
  seconds = [run["train_seconds"] for run in every]
  description = (
    "Median over seeds in percent, with the best of several in brackets, for "
    "the length of training and for four times it; and what theory says. "
    "State tracking counts sequences that are right as a whole, and recall "
    "counts tokens. "
    f"{len(every)} runs of {min(seconds) / 60:.1f} to {max(seconds) / 60:.1f} "
    "minutes."
  )
  table = markdown_table(("encoder", *columns), lines)
  return "\n\n".join([description, table, "\n".join(_reasons(rows))])


def _mad_setting(task: Mapping[str, Any]) -> int | None:
  """Returns the number of a run's setting of MAD; None for another setting."""
  first = mad.FIRST[task["problem"]]
  setting = {name: task[name] for name in first}
  settings = [first | changes for changes in mad.settings(task["problem"])]
  is_known = task.get("protocol") == "paper" and setting in settings
  return settings.index(setting) if is_known else None


def _mad_row(config: Mapping[str, Any], models: dict[str, list[str]]) -> str:
  """Returns the name of an encoder with its sizes and its number of epochs.

  Further models of one name have a number.

  Args:
    config: config of a run.
    models: models so far, as text, by name; the model of the run is added.
  """
  model = config["model"]
  examples = config["total_steps"] * config["batch_size"]
  epochs = round(examples / config["task"]["num_train"])
  sizes = f"{model['num_layers']} x {model['d_model']}"
  name = f"{row_name(config)}, {sizes}, {epochs} epochs"
  # Compression has another head, so heads are not compared.
  text = json.dumps({**model, "head": {}}, sort_keys=True)
  of_name = models.setdefault(name, [])
  if text not in of_name:
    of_name.append(text)
  place = of_name.index(text)
  return f"{name} [{place + 1}]" if place else name


def mad_scores(finished: Sequence[Result]) -> str:
  """Returns MAD's scores as a Markdown table; "" without runs of MAD.

  For each setting of a problem the best test accuracy counts, over the learning
  rates and weight decays; a training with several seeds has their mean. Models
  that differ in other options have a row each, with a number. The score of a
  problem is the mean over its settings, and MAD's score the mean over the six
  problems. Runs of other settings or protocols are left out.

  Source: Poli et al. 2024, https://arxiv.org/abs/2403.17844, section 3.

  Args:
    finished: contents of `results.json`; runs of other tasks are ignored.
  """
  # Best accuracy by encoder, problem and setting; and models by their name.
  best: dict[str, dict[str, dict[int, float]]] = {}
  models: dict[str, list[str]] = {}
  for seeds in results.by_seed(r for r in finished if r["task"] == "mad"):
    runs = list(seeds.values())
    config = runs[0]["config"]
    number = _mad_setting(config["task"])
    if number is None:
      continue
    problems = best.setdefault(_mad_row(config, models), {})
    settings = problems.setdefault(config["task"]["problem"], {})
    score = 100 * statistics.mean(run["accuracy"] for run in runs)
    settings[number] = max(score, settings.get(number, 0.0))
  if not best:
    return ""
  lines = []
  for name, problems in best.items():
    line, scores_of = [name], []
    for problem in mad.FIRST:
      settings = problems.get(problem, {})
      wanted = len(mad.settings(problem))
      if settings:
        scores_of.append(statistics.mean(settings.values()))
        partly = (
          f" ({len(settings)} of {wanted})" if len(settings) < wanted else ""
        )
        line.append(f"{scores_of[-1]:.1f}{partly}")
      else:
        line.append("")
    has_all = len(scores_of) == len(mad.FIRST)
    line.append(f"{statistics.mean(scores_of):.1f}" if has_all else "")
    lines.append(line)
  description = (
    "MAD: accuracy in percent, the mean over the settings of a problem of the "
    "training with the best test accuracy. Brackets count settings if some "
    "have no run."
  )
  header = ("encoder", *mad.FIRST, "mean")
  return f"{description}\n\n{markdown_table(header, lines)}"
