"""Reads runs from folders, groups them by recipe, and labels the groups."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers import config as configs
from jaxformers import models, tasks
from jaxformers.analysis.tables import results as tables
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError

# Sizes over which scores are drawn, with the labels of the axes.
SIZES = {
  "num_layers": "layers",
  "d_model": "width d",
  "num_experts": "experts",
  "num_heads": "heads",
  "dropout_rate": "dropout rate",
}
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """Config and results of one run.

  Attributes:
    folder: workdir of the run.
    config: content of `config.json`.
    results: content of `results.json`; {} if the run has not ended.
  """

  folder: Path
  config: Mapping[str, Any]
  results: Mapping[str, Any]

  @property
  def seed(self) -> int:
    """Seed of the config."""
    return int(self.config["seed"])

  @functools.cached_property
  def _metrics_file(self) -> tuple[list[dict[str, Any]], str]:
    """Undamaged records of `metrics.jsonl`, and the problem of the file."""
    path = self.folder / "metrics.jsonl"
    try:
      records, damaged = workdirs.read_metrics(self.folder)
    except UserError as error:
      return [], str(error)
    # The results state the number of records, once the run has ended.
    expected = self.results.get("metrics_records", len(records))
    problem = ""
    if damaged:
      problem = f"{path}: lines {damaged} are damaged."
    elif len(records) != expected:
      problem = f"{path} holds {len(records)} records instead of {expected}."
    return records, problem

  @property
  def metrics(self) -> list[dict[str, Any]]:
    """Records of `metrics.jsonl` that are not damaged."""
    return self._metrics_file[0]

  @property
  def metrics_problem(self) -> str:
    """Problem of `metrics.jsonl` as a sentence; "" if there is none."""
    return self._metrics_file[1]


@dataclasses.dataclass(frozen=True)
class SeedGroup:
  """Runs that differ only in the seed.

  Attributes:
    label: text that distinguishes the group from the others.
    runs: records in the order of their seeds.
  """

  label: str
  runs: tuple[RunRecord, ...]

  @property
  def config(self) -> Mapping[str, Any]:
    """Config of the first run."""
    return self.runs[0].config


def discover(folders: Iterable[Path]) -> tuple[list[RunRecord], list[str]]:
  """Returns the runs in folders and their subfolders, and notes on problems."""
  records: dict[Path, RunRecord] = {}
  notes = []
  for top in folders:
    # A workdir holds config.json, results.json or both.
    paths = tables.files(top, "config.json") + tables.files(top, "results.json")
    num_read = 0
    for folder in sorted({path.parent for path in paths}):
      try:
        # Count a run once, even if it is found twice.
        records[folder.resolve()] = _read_run(folder)
        num_read += 1
      except UserError as error:
        notes.append(str(error))
    if not num_read:
      notes.append(f"{top}: there is no run in it or below it.")
  return list(records.values()), notes


def _read_run(folder: Path) -> RunRecord:
  """Returns the run in a folder that has config.json, results.json or both.

  Raises:
    UserError: if a file cannot be read, or if the files belong to two runs.
  """
  results: dict[str, Any] = {}
  if (folder / "results.json").exists():
    results = workdirs.read_all_scores(folder)
    workdirs.check_config(folder, "results.json", results["config"])
  # Without config.json, take the config from the results.
  if not (folder / "config.json").exists():
    return RunRecord(folder, results["config"], results)
  config = workdirs.read_config(folder)
  if results:
    _check_same_config(folder, config, results["config"])
  return RunRecord(folder, config, results)


def _check_same_config(
  folder: Path, config: Mapping[str, Any], scored: Mapping[str, Any]
) -> None:
  """Raises UserError if the results have another config than `config.json`.

  Args:
    folder: workdir of the run.
    config: content of `config.json`.
    scored: config in `results.json`.
  """
  # Ignore steps and patience, which may be raised to continue a run.
  now = configs.complete(config)
  grown = {key: now[key] for key in ("total_steps", "patience")}
  before, now = (
    tasks.resolve_defaults(models.resolve_defaults(fields))
    for fields in (configs.complete({**scored, **grown}), now)
  )
  differing = configs.differences(before, now)
  if differing:
    raise UserError(
      f"{folder}: config.json and results.json differ in "
      f"{', '.join(differing[:3])}. Remove the file that belongs to another "
      "run, and run the training command again."
    )


def group_by_recipe(runs: Sequence[RunRecord]) -> list[SeedGroup]:
  """Returns runs grouped by recipe, with a label for each group.

  The runs of a group differ only in the seed. If two runs have the same recipe
  and seed, the finished one counts, or the first one if both have or have not
  ended. The data of an unfinished run are unknown, so that it joins the group
  of the finished runs with the same config.
  """
  by_recipe: dict[str, dict[int, RunRecord]] = {}
  recipe_of_config: dict[str, str] = {}
  # Process ended runs first, so that the others can join their groups.
  for record in sorted(runs, key=lambda record: not record.results):
    content = {"config": record.config}
    config = tables.recipe(content)
    data = record.results.get("task_description")
    recipe = tables.recipe({**content, "task_description": data})
    if not record.results:
      recipe = recipe_of_config.get(config, recipe)
    recipe_of_config.setdefault(config, recipe)
    by_recipe.setdefault(recipe, {}).setdefault(record.seed, record)
  # Order the runs of each group by seed.
  groups = [
    tuple(by_seed[seed] for seed in sorted(by_seed))
    for by_seed in by_recipe.values()
  ]
  return list(map(SeedGroup, _labels(groups), groups))


def _labels(groups: Sequence[tuple[RunRecord, ...]]) -> list[str]:
  """Returns a label for each group: the model, and fields that differ."""
  flat = [tables.labelled_fields(records[0].config) for records in groups]
  # Name up to three fields that differ; if labels coincide, name all of them.
  labels = [_label(config, flat, most=3) for config in flat]
  for k in _repeated(labels):
    labels[k] = _label(flat[k], flat, most=len(flat[k]))
  # Add the folder to labels that still coincide.
  for k in _repeated(labels):
    labels[k] = f"{labels[k]} ({groups[k][0].folder})"
  return labels


def _label(config: Fields, others: Sequence[Fields], most: int) -> str:
  """Returns a label: the model and up to `most` fields that differ.

  Args:
    config: fields of the group's config.
    others: fields of the configs of all groups.
    most: largest number of fields in the label.
  """
  model, task = config["model.name"], config["task.name"]
  several_tasks = len({other["task.name"] for other in others}) > 1
  name = f"{task} {model}" if several_tasks else str(model)
  # Name only fields that differ between runs of this model and task.
  names = ("model.name", "task.name")
  of_model = [o for o in others if all(o[k] == config[k] for k in names)]
  keys = tables.differing_keys(config, of_model)
  keys.sort(key=lambda key: (not key.startswith("model."), key))
  return ", ".join([name, *tables.assignments(config, keys[:most])])


def _repeated(labels: Sequence[str]) -> list[int]:
  """Returns the places of labels that occur more than once."""
  return [k for k, label in enumerate(labels) if labels.count(label) > 1]


def describe_seeds(groups: Sequence[SeedGroup]) -> str:
  """Returns the number of seeds of each group, in words."""
  counts = {len(group.runs) for group in groups}
  few, many = min(counts), max(counts)
  if many == 1:
    return "one seed: no deviation"
  return f"{few} seeds" if few == many else f"{few} to {many} seeds"


def by_size(
  groups: Sequence[SeedGroup],
) -> Iterator[tuple[str, str, float, SeedGroup]]:
  """Yields (line, size, value, group) for every size that varies.

  The groups of a line differ only in the size. Dropout counts as a size if the
  rates that vary between the runs of a model, such as the rates of the block
  and the embedding, are equal to each other in every run.
  """
  by_model: dict[str, list[SeedGroup]] = {}
  # Separate tasks of one name but different data, such as a user's examples.
  data = [tables.describe_data(group.runs[0].results) for group in groups]
  tasks = [group.config["task"]["name"] for group in groups]
  for group, task, digest in zip(groups, tasks, data, strict=True):
    pairs = zip(tasks, data, strict=True)
    several = {other for name, other in pairs if name == task} - {""}
    mark = f", data {digest[:6]}" if len(several) > 1 and digest else ""
    name = f"{task} {group.config['model']['name']}{mark}"
    by_model.setdefault(name, []).append(group)
  for (name, of_model), size in itertools.product(by_model.items(), SIZES):
    lines: dict[str, list[tuple[float, SeedGroup]]] = {}
    rates = _dropout_rates(of_model)
    # Group by the other sizes and all other options, which a line fixes.
    for group in of_model:
      shape = _sizes(group.config) | rates.get(group.label, {})
      if size in shape:
        fixed = ", ".join(f"{k}={v}" for k, v in shape.items() if k != size)
        others = _other_options(group, of_model, rates)
        line = f"{name} ({fixed}){others}"
        lines.setdefault(line, []).append((shape[size], group))
    for line, points in lines.items():
      # Skip lines of a single value.
      if len({value for value, _ in points}) > 1:
        yield from ((line, size, value, group) for value, group in points)


def _dropout_rates(
  of_model: Sequence[SeedGroup],
) -> dict[str, dict[str, float]]:
  """Returns the size "dropout_rate" of each group, by label of the group.

  Returns {} if no rate varies between the groups, or if the rates that vary are
  not equal to each other in every group.
  """
  # Collect the dropout rates of each group, by dotted name.
  flat = [tables.labelled_fields(group.config) for group in of_model]
  flat = [
    {
      key: value
      for key, value in fields.items()
      if key.startswith("model.") and key.endswith(".dropout_rate")
    }
    for fields in flat
  ]
  differing = {
    key for rates in flat for key in tables.differing_keys(rates, flat)
  }
  # Require that the rates that vary have one value in every group.
  sizes: dict[str, dict[str, Any]] = {}
  for group, rates in zip(of_model, flat, strict=True):
    values = {rates.get(key) for key in differing}
    if len(values) != 1 or None in values:
      return {}
    sizes[group.label] = {"dropout_rate": values.pop()}
  return sizes


def _other_options(
  group: SeedGroup,
  of_model: Sequence[SeedGroup],
  rates: Mapping[str, Mapping[str, float]],
) -> str:
  """Returns the group's options that vary besides the sizes, in words, or "".

  Args:
    group: one of the groups of the model.
    of_model: all groups of the model.
    rates: result of `_dropout_rates`.
  """
  config = tables.labelled_fields(group.config)
  others = [configs.flatten(other.config) for other in of_model]
  keys = [
    key
    for key in sorted(tables.differing_keys(config, others))
    if not (
      key.rpartition(".")[2] in SIZES or tables.follows_sizes(key, others)
    )
    or (key.endswith(".dropout_rate") and not rates)
  ]
  return "".join(f", {text}" for text in tables.assignments(config, keys))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
  """Returns the sizes of a config, except for the dropout rate."""
  model = config["model"]
  # Read the numbers of experts and heads from the options of the mixer.
  shared = model.get("mixer_defaults", {})
  options = {**model, **shared, **model.get("mixer", {})}
  names = (name for name in SIZES if name != "dropout_rate")
  return {name: options[name] for name in names if name in options}
