"""Which runs lie in some folders, what tells them apart, what they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers import config as configs
from jaxformers import models, workdirs
from jaxformers.analysis.tables import results as tables
from jaxformers.errors import UserError

# What a label leaves out: it says nothing of a model, or all have it.
SILENT = (*configs.RESUMABLE_FIELDS, "reference.", "seed")

SIZES = {
  "num_layers": "layers",
  "d_model": "width d",
  "num_experts": "experts",
}


@dataclasses.dataclass(frozen=True)
class One:
  """A run.

  Attributes:
    folder: its workdir.
    config: as in `config.json`.
    results: as in `results.json`; {} if it has not ended.
  """

  folder: Path
  config: Mapping[str, Any]
  results: Mapping[str, Any]

  @property
  def seed(self) -> int:
    """Of the run."""
    return int(self.config["seed"])

  def metrics(self) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl` that are not damaged."""
    try:
      return workdirs.read_metrics(self.folder)[0]
    except ValueError:
      return []  # `metrics_problem` says why.

  def metrics_problem(self) -> str:
    """Returns what is wrong with `metrics.jsonl`; "" for nothing."""
    try:
      records, damaged = workdirs.read_metrics(self.folder)
    except ValueError as error:
      return str(error)
    path = self.folder / "metrics.jsonl"
    if damaged:
      return f"{path}: lines {damaged} are damaged."
    # Results of older versions have no number of records.
    expected = self.results.get("metrics_records", len(records))
    if len(records) != expected:
      return f"{path} holds {len(records)} records instead of {expected}."
    return ""


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ in the seed alone.

  Attributes:
    label: what tells it from the others.
    runs: in the order of their seeds.
  """

  label: str
  runs: tuple[One, ...]

  @property
  def config(self) -> Mapping[str, Any]:
    """Of the first."""
    return self.runs[0].config


def discover(folders: Iterable[Path]) -> tuple[list[One], list[str]]:
  """Returns the runs in folders and below, and what is wrong with the rest."""
  found: dict[Path, One] = {}
  notes = []
  for workdir in folders:
    paths = sorted(
      {
        path.parent
        for name in ("config", "results")
        for path in tables.files(workdir, f"{name}.json")
      }
    )
    own = []
    for folder in paths:
      try:
        own.append(_read(folder))
      except ValueError as error:
        notes.append(str(error))
    if not own:
      notes.append(f"{workdir}: there is no run in it or below it.")
    found |= {one.folder.resolve(): one for one in own}
  return list(found.values()), notes


def _read(folder: Path) -> One:
  results: dict[str, Any] = {}
  if (folder / "results.json").exists():
    results = workdirs.read_results(folder)
    workdirs.check_config(folder, "results.json", results["config"])
  if (folder / "config.json").exists():
    config = workdirs.read_config(folder)
    if results:
      _check_same(folder, config, results["config"])
    return One(folder, config, results)
  return One(folder, results["config"], results)


def _check_same(
  folder: Path, config: Mapping[str, Any], scored: Mapping[str, Any]
) -> None:
  """Raises UserError if results are of another config than `config.json`."""
  # A run that goes on has results of fewer steps or of less patience.
  now = models.resolve_defaults(configs.complete(config))
  grown = {key: now[key] for key in ("total_steps", "patience")}
  before = models.resolve_defaults(configs.complete({**scored, **grown}))
  differing = configs.differences(before, now)
  if differing:
    raise UserError(
      f"{folder}: config.json is not that of results.json ("
      + ", ".join(differing[:3])
      + "). Remove the one that is of another run, and run the training "
      "command again."
    )


def groups(runs: Sequence[One]) -> list[Group]:
  """Runs by recipe; labels name the model and what else differs.

  Of two with one recipe and one seed the one that has ended counts, or else the
  first. What data a run that has not ended is of is not known: it counts to the
  others of its config.
  """
  by: dict[str, dict[int, One]] = {}
  known: dict[str, str] = {}
  for one in sorted(runs, key=lambda one: not one.results):
    own = {"config": one.config}
    config = tables.recipe(own)
    about = one.results.get("task_description")
    key = tables.recipe({**own, "task_description": about})
    if not one.results:
      key = known.get(config, key)
    known.setdefault(config, key)
    by.setdefault(key, {}).setdefault(one.seed, one)
  recipes = [tuple(v for _, v in sorted(own.items())) for own in by.values()]
  flat = [
    {
      k: v
      for k, v in configs.flatten(own[0].config).items()
      if not k.startswith(SILENT)
    }
    for own in recipes
  ]
  several = len({own["task.name"] for own in flat}) > 1

  def names(own: Mapping[str, Any], count: int) -> str:
    """The model, and so many of what differs from runs of it, sizes first."""
    name = str(own["model.name"])
    if several:
      name = f"{own['task.name']} {name}"
    rest = [
      other
      for other in flat
      if (other["model.name"], other["task.name"])
      == (own["model.name"], own["task.name"])
    ]
    keys = [k for k in own if len({str(o.get(k)) for o in rest}) > 1]
    keys.sort(key=lambda k: (not k.startswith("model."), k))
    told = [f"{k.rpartition('.')[2]}={own[k]}" for k in keys[:count]]
    return ", ".join([name, *told])

  labels = [names(own, 3) for own in flat]
  twice = {label for label in labels if labels.count(label) > 1}
  for k, own in enumerate(flat):
    if labels[k] in twice:
      labels[k] = names(own, len(own))
  twice = {label for label in labels if labels.count(label) > 1}
  for k, label in enumerate(labels):  # They differ in what is silent.
    if label in twice:
      labels[k] = f"{label} ({recipes[k][0].folder})"
  return [Group(label, own) for label, own in zip(labels, recipes, strict=True)]


def seeds(found: Sequence[Group]) -> str:
  """How many seeds lines are of, in words."""
  counts = {len(group.runs) for group in found}
  few, many = min(counts), max(counts)
  if many == 1:
    return "one seed: no deviation"
  return f"{few} seeds" if few == many else f"{few} to {many} seeds"


def by_size(found: Sequence[Group]) -> Iterator[tuple[str, str, int, Group]]:
  """(line, size, value, run) where along a line a size alone differs."""
  for (task, model), own in _by_model(found).items():
    for name in SIZES:
      lines: dict[str, list[tuple[int, Group]]] = {}
      for group in own:
        shape = _sizes(group.config)
        if name in shape:
          rest = ", ".join(f"{k}={v}" for k, v in shape.items() if k != name)
          key = f"{task} {model} ({rest}){_others(group, own)}"
          lines.setdefault(key, []).append((shape[name], group))
      for key, places in lines.items():
        if len({value for value, _ in places}) > 1:
          yield from ((key, name, value, group) for value, group in places)


def _others(group: Group, own: Sequence[Group]) -> str:
  """What differs between runs of a model beside its sizes; "" for nothing."""
  flat = [configs.flatten(other.config) for other in own]
  mine = configs.flatten(group.config)
  sized = (*SIZES, "mlp_dim", "scale", "init_std")
  keys = [
    k
    for k in mine
    if not k.startswith(SILENT)
    and k.rpartition(".")[2] not in sized
    and len({str(f.get(k)) for f in flat}) > 1
  ]
  return "".join(f", {k.rpartition('.')[2]}={mine[k]}" for k in sorted(keys))


def _by_model(
  found: Sequence[Group],
) -> dict[tuple[str, str], list[Group]]:
  by: dict[tuple[str, str], list[Group]] = {}
  for group in found:
    key = (group.config["task"]["name"], group.config["model"]["name"])
    by.setdefault(key, []).append(group)
  return by


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
  model = config["model"]
  known = {**model, **model.get("mixer", {})}
  return {name: known[name] for name in SIZES if name in known}
