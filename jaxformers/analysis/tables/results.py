"""Tables of results: mean and deviation over seeds, a table for each metric."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers import config as configs
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table, plus_minus, spread

COLUMNS = (
  "task",
  "protocol",
  "model",
  "config",
  "steps",
  "score",
  "seeds",
  "parameters",
  "x Transformer",
  "trivial",
  "chosen on",
  "train s",
)

Result = Mapping[str, Any]

# Properties in which rows must agree to be compared, with their titles.
COMPARED = {
  "steps": "steps",
  "batch_size": "batch size",
  "protocol": "protocol",
}
FORMATS = {
  "steps": "{:,}",
  "parameters": "{:,}",
  "x Transformer": "{:.2f}",
  "train s": "{:.0f}",
}
LOWER_IS_BETTER = ("perplexity", "error")
# Fields in which the runs of a recipe may differ. Imported code may define the
# model, so it is the same in all of them.
FIELDS_OF_RUN = tuple(
  name for name in (*configs.RESUMABLE_FIELDS, "seed") if name != "imports"
)
# Fields that a label never names, because they do not describe the model.
UNLABELLED_FIELDS = (*FIELDS_OF_RUN, "reference.")
SIZES = ("num_layers", "d_model")
# Options that are usually derived from the sizes.
DERIVED_OPTIONS = ("mlp_dim", "scale", "init_std")
# Titles of the metrics in a table; shares are in percent.
TITLES = {
  "accuracy": "accuracy %",
  "mean_iou": "mean IoU %",
  "perplexity": "perplexity",
  "error": "mean error",
  "f1": "F1 %",
  "spearman": "Spearman %",
}
# Shares of right tokens and sequences that `results.json` has by length.
BY_LENGTH = ("accuracy", "sequence_accuracy")


def files(folder: Path, name: str) -> list[Path]:
  """Returns the files of a name in a folder and its subfolders.

  Folders named `checkpoints` are skipped.
  """
  return sorted(
    path
    for path in folder.rglob(name)
    if "checkpoints" not in path.relative_to(folder).parts
  )


def read_runs(folders: Iterable[Path]) -> list[dict[str, Any]]:
  """Returns the contents of each `results.json` in folders and subfolders.

  A file that cannot be read, or that has the recipe and the seed of an earlier
  one, is skipped, and reported on stderr with the reason.

  Raises:
    UserError: if no file can be read. The message lists the reasons.
  """
  results: list[dict[str, Any]] = []
  problems: list[str] = []
  paths_by_run: dict[tuple[str, int], Path] = {}
  for folder in folders:
    # Note a folder without results, and read the other folders.
    paths = files(folder, "results.json")
    if not paths:
      problems.append(
        f"There is no results.json in {folder} or below it: give the workdirs "
        "of finished runs. The training command of a run finishes it."
      )
    for path in paths:
      try:
        result = workdirs.read_all_scores(path.parent)
        key = (recipe(result), result["seed"])
        first = paths_by_run.setdefault(key, path.resolve())
        if first != path.resolve():
          raise UserError(f"{path}: {first} has the same recipe and seed.")
        results.append(result)
        # Keep a result with a damaged best checkpoint, but print a note.
        if "damaged_best_step" in results[-1]:
          note = describe_damage(results[-1])
          print(f"Note: {path}: {note}", file=sys.stderr)
      except UserError as error:
        problems.append(str(error))
  if not results:
    raise UserError("\n".join(problems))
  for problem in problems:
    print(f"Left out: {problem}", file=sys.stderr)
  return results


def describe_damage(result: Result) -> str:
  """Returns the sentence about results whose best checkpoint was damaged."""
  return (
    f"its best checkpoint, of step {result['damaged_best_step']}, was damaged; "
    f"the checkpoint of step {result['best_step']} was scored instead."
  )


def recipe(result: Result) -> str:
  """Returns the fields in which all runs of a recipe agree, as JSON."""
  flat = configs.flatten(result["config"])
  # Drop the seed, and fields that do not change the numbers.
  fixed = {key: flat[key] for key in flat if key not in FIELDS_OF_RUN}
  # Ignore the seed in the path of the pre-trained weights: each seed may start
  # from the pre-training run with the same seed.
  folder_of_seed = rf"/seed_{flat.get('seed')}(?=/|$)"
  fixed["pretrained"] = re.sub(
    folder_of_seed, "", str(flat.get("pretrained", ""))
  )
  return json.dumps([fixed, result.get("task_description")], sort_keys=True)


def by_seed(runs: Iterable[Result]) -> list[dict[int, Result]]:
  """Returns the runs of each recipe, by seed.

  If a recipe has several runs with the same seed, the first one counts.
  """
  groups: dict[str, dict[int, Result]] = {}
  for run in runs:
    groups.setdefault(recipe(run), {}).setdefault(run["seed"], run)
  return list(groups.values())


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
  """Returns a row for every recipe, with mean and deviation over its seeds.

  Args:
    results: contents of `results.json`. Runs that differ in their data, or in a
      field outside of `FIELDS_OF_RUN`, have separate rows. A seed that occurs
      twice counts once.

  Returns:
    Rows with the fields of `COLUMNS`, and with `metric`, `batch_size`, `data`
    and `by_length`, the scores of `BY_LENGTH` by metric and length. A score is
    (mean, sample standard deviation), in percent for shares. The deviation of a
    single seed is NaN. `data` is the digest of the data, or "" if it is
    unknown. The training time is None if the hardware differs.
  """
  # Group the runs by recipe, and describe how the recipes differ.
  rows: list[dict[str, Any]] = []
  recipes = by_seed(results)
  settings = _describe_settings([next(iter(r.values())) for r in recipes])
  for seeds, setting in zip(recipes, settings, strict=True):
    runs = list(seeds.values())
    # Seeds of a recipe share their config and their data.
    first = runs[0]
    metric = first["metric"]
    # Shares are in percent; perplexities and errors are not scaled.
    scale = 1 if metric in LOWER_IS_BETTER else 100
    rows.append(
      {
        "task": first["task"],
        "protocol": describe_protocol(first),
        "model": first["model"],
        "config": " ".join(filter(None, (describe_size(first), setting))),
        "steps": first["config"].get("total_steps"),
        "batch_size": first["config"].get("batch_size"),
        "data": describe_data(first),
        "metric": metric,
        "score": spread([scale * run[metric] for run in runs]),
        "seeds": " ".join(map(str, sorted(seeds))),
        "parameters": first["parameters"],
        "x Transformer": first["parameter_ratio"],
        "trivial": {k: scale * v for k, v in first["baselines"].items()},
        "chosen on": first["selection"],
        "train s": statistics.mean(run["train_seconds"] for run in runs)
        if len(on_hardware_of_first(runs)) == len(runs)
        else None,
        "by_length": _scores_by_length(runs),
      }
    )
  # Name the data if tasks of one name have different data, such as a user's
  # examples.
  data_by_task: dict[tuple[str, str], set[str]] = {}
  for row in rows:
    key = (row["task"], row["protocol"])
    data_by_task.setdefault(key, set()).add(row["data"])
  for row in rows:
    if len(data_by_task[row["task"], row["protocol"]]) > 1 and row["data"]:
      row["protocol"] += f", data {row['data'][:6]}"
  return sorted(rows, key=lambda row: (row["task"], row["model"]))


def on_hardware_of_first(runs: Sequence[Result]) -> list[Result]:
  """Returns the runs with the same hardware as the first one."""
  wanted = runs[0].get("hardware")
  return [run for run in runs if run.get("hardware") == wanted]


def _scores_by_length(
  runs: Sequence[Result],
) -> dict[str, dict[int, tuple[float, float]]]:
  """Returns mean and deviation of `BY_LENGTH` in percent, by metric and length.

  Args:
    runs: results of one recipe; without scores by length, the result is {}.
  """
  lengths = runs[0].get("by_length", {})
  return {
    metric: {
      int(length): spread([100 * r["by_length"][length][metric] for r in runs])
      for length in lengths
    }
    for metric in BY_LENGTH
    if lengths
  }


def describe_data(result: Result) -> str:
  """Returns a digest of the examples of all splits, or "" if it is unknown."""
  data = (result.get("task_description") or {}).get("data")
  return workdirs.digest(data) if data else ""


def labelled_fields(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a config that a label may name, by dotted name."""
  fields = configs.flatten(config).items()
  return {k: v for k, v in fields if not k.startswith(UNLABELLED_FIELDS)}


def differing_keys(
  config: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> list[str]:
  """Returns the fields of a config whose values vary among other configs."""
  return [k for k in config if len({str(o.get(k)) for o in others}) > 1]


def follows_sizes(key: str, fields: Sequence[Mapping[str, Any]]) -> bool:
  """Returns True for a derived option with one value for equal `SIZES`.

  Args:
    key: dotted name of the option.
    fields: flat configs of runs of one task and model.
  """
  by_size: dict[tuple[Any, ...], set[str]] = {}
  for config in fields:
    size = tuple(config.get(f"model.{name}") for name in SIZES)
    by_size.setdefault(size, set()).add(str(config.get(key)))
  is_derived = key.rpartition(".")[2] in DERIVED_OPTIONS
  return is_derived and all(len(values) == 1 for values in by_size.values())


def assignments(config: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
  """Returns "name=value" for each field, with the last part of its name."""
  return [f"{key.rpartition('.')[2]}={config[key]}" for key in keys]


def _describe_settings(results: Sequence[Result]) -> list[str]:
  """Returns the fields of each result that vary within its task and model.

  Sizes and protocol are left out, because the table has separate columns for
  them.
  """
  apart = ("task.protocol", *(f"model.{name}" for name in SIZES))
  flat = [labelled_fields(result["config"]) for result in results]
  texts = []
  for result, config in zip(results, flat, strict=True):
    # Compare with the results of the same task and model.
    kind = (result["task"], result["model"])
    others = [
      fields
      for other, fields in zip(results, flat, strict=True)
      if (other["task"], other["model"]) == kind
    ]
    keys = [
      key
      for key in differing_keys(config, others)
      if key not in apart and not follows_sizes(key, others)
    ]
    # Name at most three fields, beginning with fields of the model.
    keys.sort(key=lambda key: (not key.startswith("model."), key))
    texts.append(" ".join(assignments(config, keys[:3])))
  return texts


def over_settings(rows: Sequence[Result]) -> list[dict[str, Any]]:
  """Returns mean and deviation over the settings of each model.

  The settings of a model are its rows with the same task, data and protocol.
  Each setting counts once, by its mean over seeds. An example is TransJect's
  figure 3, where the deviations of TransJect over settings are 1.7 (IMDb) and
  0.8 (Text).

  Args:
    rows: result of `summarise`.
  """
  # Group the rows by task, protocol, model, metric and data.
  groups: dict[tuple[str, ...], list[Result]] = {}
  for row in rows:
    names = ("task", "protocol", "model", "metric", "data")
    key = tuple(row.get(name, "") for name in names)
    groups.setdefault(key, []).append(row)
  # Summarise the models that have several settings.
  lines = []
  for (task, protocol, model, metric, _), of_model in groups.items():
    means = [row["score"][0] for row in of_model]
    if len(means) > 1:
      lines.append(
        {
          "task": task,
          "protocol": protocol,
          "model": model,
          "metric": metric,
          "settings": len(means),
          "score": spread(means),
          "lowest": min(means),
          "highest": max(means),
        }
      )
  return lines


def describe_size(result: Result) -> str:
  """Returns the number of layers and the width of a run's model, in words."""
  model = result["config"]["model"]
  return f"L={model['num_layers']} d={model['d_model']}"


def describe_protocol(result: Result) -> str:
  """Returns the protocol, the length and the origin of the data, in words."""
  data = result["data"]
  length = f", {result['max_len']} long" if result["max_len"] else ""
  notes = {False: ", another archive", None: ", archive of unknown checksum"}
  note = notes.get(data.get("authors_checksum", True), "")
  if data.get("source") == "generated":
    note = ", generated"
  return result["protocol"] + length + note


def notes(rows: Sequence[Result]) -> list[str]:
  """Returns a warning for each task whose rows cannot all be compared.

  Args:
    rows: result of `summarise`.
  """
  lines = []
  for task in dict.fromkeys(row["task"] for row in rows):
    of_task = [row for row in rows if row["task"] == task]
    # List the properties in which the rows differ, with their values.
    differing = []
    for name, title in COMPARED.items():
      values = {row.get(name) for row in of_task} - {None}
      if len(values) > 1:
        ordered = sorted(values, key=lambda v: (isinstance(v, str), v))
        shown = ("; " if name == "protocol" else ", ").join(
          v if isinstance(v, str) else f"{v:,}" for v in ordered
        )
        differing.append(f"{title} ({shown})")
    if differing:
      lines.append(
        f"Rows of {task} differ in {' and in '.join(differing)}: compare those "
        "that agree."
      )
  return lines


def _cell(column: str, value: Any) -> str:
  """Returns the value of a column as text."""
  if value is None:
    return ""
  if column == "score":
    return plus_minus(*value)
  if column == "trivial":
    return ", ".join(f"{name} {score:.1f}" for name, score in value.items())
  return FORMATS.get(column, "{}").format(value)


def markdown(rows: Sequence[Result]) -> str:
  """Returns the rows of `summarise` as Markdown, a table for each metric.

  A table is followed by its `notes`. If a model has several settings, a table
  of the spread over settings follows.
  """
  tables = []
  # Order the metrics by their first row.
  for metric in dict.fromkeys(row["metric"] for row in rows):
    title = TITLES[metric]
    trivial = "trivial %" if title.endswith("%") else "trivial"
    titles = {"score": title, "trivial": trivial}
    header = [titles.get(name, name) for name in COLUMNS]
    of_metric = [row for row in rows if row["metric"] == metric]
    lines = ([_cell(name, row[name]) for name in COLUMNS] for row in of_metric)
    tables += [markdown_table(header, lines), *notes(of_metric)]
    tables += _length_tables(of_metric)
    # Add the spread over settings.
    spreads = over_settings(of_metric)
    if spreads:
      columns = ("task", "protocol", "model", "settings", "score", "range")
      lines = (
        [
          *(str(line[name]) for name in columns[:4]),
          plus_minus(*line["score"]),
          f"{line['lowest']:.2f} to {line['highest']:.2f}",
        ]
        for line in spreads
      )
      header = [*columns[:4], f"{title} over settings", columns[5]]
      tables.append(markdown_table(header, lines))
  return "\n\n".join(tables)


def _length_tables(rows: Sequence[Result]) -> list[str]:
  """Returns a table of scores over lengths for each metric of `BY_LENGTH`."""
  rows = [row for row in rows if row["by_length"]]
  lengths = sorted({n for row in rows for n in row["by_length"][BY_LENGTH[0]]})
  tables = []
  for metric in BY_LENGTH if rows else ():
    title = f"{metric.replace('_', ' ')} % by length"
    lines = (
      [
        *(row[name] for name in ("task", "protocol", "model", "config")),
        *(
          plus_minus(*scores[n]) if n in scores else ""
          for scores in (row["by_length"][metric],)
          for n in lengths
        ),
      ]
      for row in rows
    )
    header = ("task", "protocol", "model", f"config; {title}")
    tables.append(markdown_table((*header, *map(str, lengths)), lines))
  return tables
