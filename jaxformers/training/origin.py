"""Trained weights that a run begins with, and the record of where from.

`config.pretrained` names a folder: the workdir of a run, one that
`python -m jaxformers export` has written, or one of Hugging Face.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxformers import config as configs
from jaxformers import models, paths, workdirs
from jaxformers.errors import UserError
from jaxformers.models import pretrained
from jaxformers.models.config import NEXT, PLAIN_HEAD
from jaxformers.models.transplant import (
  CAUSAL_ADVICE,
  Transplant,
  transplant,
)
from jaxformers.tasks import Task, arrays
from jaxformers.training.checkpoint import read_best

RECORD = "pretrained.json"  # File of a workdir with the record.
PARAMETERS = "parameters.safetensors"  # File of an exported model.


class Weights(NamedTuple):
  """A trained model, without its program and its data.

  Attributes:
    params: tree of parameters, NumPy arrays.
    model: section `config.model` of its run.
    task: description of its task; see `Task.description`.
    record: content of its `vocabulary.json`: tokens, classes, sizes.
    step: step of its checkpoint.
    imports: modules of a user's code that it needs; see `config.imports`.
  """

  params: Any
  model: dict[str, Any]
  task: Mapping[str, Any]
  record: Mapping[str, Any]
  step: int
  imports: str = ""

  @property
  def vocabulary(self) -> tuple[str, ...]:
    """Meaning of its ids; () if its inputs are numbers."""
    return tuple(self.record.get("tokens", ()))

  @property
  def objective(self) -> str:
    """Objective of its task; "" if an older version wrote the record."""
    return self.record.get("sizes", {}).get("objective", "")

  def has_same_head(self, task: Task) -> bool:
    """Returns True if the model predicts what a model of a task predicts."""
    if task.name == arrays.NAME:
      # Examples given in Python have one name, whatever they are.
      return dict(self.task) == task.description()
    return (
      self.task.get("task") == task.name
      and self.objective in ("", task.objective)
      and tuple(self.record.get("classes", task.classes)) == task.classes
    )


def read(folder: Path) -> Weights | None:
  """Returns the weights of a run, or of an exported one; None for others.

  Raises:
    UserError: for a run without an evaluated checkpoint, a folder with the runs
      of several seeds, or files that are damaged.
  """
  if (folder / PARAMETERS).is_file():
    return _read_exported(folder)
  if is_run(folder):
    config = configs.complete(workdirs.read_config(folder))
    configs.import_modules(config)
    best, about = read_best(folder, config)
    params = jax.device_get(best.state.scored)
    record = workdirs.read(folder, "vocabulary.json")
    fields = (config["model"], about, record, best.step, config["imports"])
    return Weights(params, *fields)
  if seeds := sorted(folder.glob("seed_*")):
    names = ", ".join(seed.name for seed in seeds)
    raise UserError(
      f"{folder} holds the runs of several seeds, {names}: give one of them, "
      f"such as {seeds[0]}."
    )
  return None


def is_run(folder: Path) -> bool:
  """Returns True if a folder has the `config.json` of a run."""
  try:
    content = json.loads((folder / "config.json").read_bytes())
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(content, dict) and {"task", "schedule"} <= content.keys()


def _read_exported(folder: Path) -> Weights:
  """Returns the weights of a folder that `export` has written."""
  path = folder / PARAMETERS
  try:
    flat = safetensors.numpy.load_file(path)
    content = json.loads((folder / "model.json").read_bytes())
    about = {key: content[key] for key in ("model", "task", "step")}
    about["imports"] = content.get("imports", "")
  except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
    raise UserError(
      f"{folder} cannot be read as an exported model ({error}): write it again "
      "with python -m jaxformers export."
    ) from None
  params = flax.traverse_util.unflatten_dict(flat, sep="/")
  configs.import_modules(about)
  record = workdirs.read(folder, "vocabulary.json")
  return Weights(params, record=record, **about)


def write_parameters(folder: Path, params: Any) -> None:
  """Writes the parameters of a model, for `read` to find them."""
  flat = flax.traverse_util.flatten_dict(jax.device_get(params), sep="/")
  arrays = {name: np.asarray(leaf, order="C") for name, leaf in flat.items()}
  safetensors.numpy.save_file(arrays, folder / PARAMETERS)


def begin_with(
  folder: str | Path, start: Any, model: Mapping[str, Any], task: Task
) -> tuple[Any, dict[str, Any]]:
  """Returns a model's parameters with trained ones in them, and a record.

  Args:
    folder: workdir of a run, exported model, or folder of Hugging Face.
    start: parameters of the model at its start.
    model: section `config.model` of the model that begins.
    task: task of the model.

  Returns:
    The parameters; and the record as plain JSON: `folder`, `sha256` of the
    parameters that were taken over, `new` and `resized` ones; and of a run its
    `step`, `task`, `protocol`, `objective`, and the options of the encoder that
    differ.

  Raises:
    UserError: for weights of another architecture or vocabulary, naming what
      differs; for a folder that cannot be read.
  """
  path = paths.expand(folder).absolute()
  weights = read(path)
  if weights is None:
    params = pretrained.parameters(path, start)
    record = {"folder": str(path)}
    names = _same_leaves(start, params)
    return params, record | _record(params, new=names)
  differing = _differences(weights, model, task.objective)
  is_causal = weights.objective in NEXT and task.objective not in NEXT
  chosen = transplant(
    start,
    weights.params,
    image=task.image,
    vocabulary=task.vocabulary,
    source_vocabulary=weights.vocabulary,
    same_task=weights.has_same_head(task),
    name=str(path),
    advice=CAUSAL_ADVICE if is_causal else "",
  )
  record = {
    "folder": str(path),
    "step": weights.step,
    "task": weights.task.get("task"),
    "protocol": weights.task.get("protocol"),
    "objective": weights.objective,
    "model": weights.model["name"],
    "differing_options": differing,
  }
  return chosen.params, record | _of_transplant(chosen)


def _of_transplant(chosen: Transplant) -> dict[str, Any]:
  return _record(
    chosen.params,
    new=chosen.new,
    resized=chosen.resized,
    unused=chosen.unused,
  )


def _record(params: Any, **groups: tuple[str, ...]) -> dict[str, Any]:
  """Returns the digest of the parameters that are not new, and the groups."""
  flat = flax.traverse_util.flatten_dict(jax.device_get(params), sep="/")
  digest = hashlib.sha256()
  for name in sorted(flat.keys() - set(groups["new"])):
    leaf = np.ascontiguousarray(flat[name])
    digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
    digest.update(leaf.tobytes())
  lists = {key: list(names) for key, names in groups.items()}
  taken = len(flat) - len(groups["new"])
  return {"sha256": digest.hexdigest(), "taken": taken, **lists}


def _same_leaves(start: Any, params: Any) -> tuple[str, ...]:
  """Returns the paths of the leaves that both trees share as one array."""
  ours, theirs = (
    flax.traverse_util.flatten_dict(tree, sep="/") for tree in (start, params)
  )
  return tuple(sorted(name for name in ours if ours[name] is theirs[name]))


def _differences(
  weights: Weights, model: Mapping[str, Any], objective: str
) -> list[str]:
  """Returns the options of two encoders that differ, as "option: a -> b".

  Args:
    weights: trained model.
    model: section `config.model` of the model that begins.
    objective: objective of its task.

  Raises:
    UserError: for another map of orthogonal matrices, whose parameters mean
      something else.
  """
  theirs, ours = (
    section.get("orthogonal_map", "cayley")
    for section in (weights.model, model)
  )
  if theirs != ours:
    raise UserError(
      f"The weights are of orthogonal_map={theirs!r}, and the model has "
      f"{ours!r}, whose parameters mean other matrices: set "
      f"--config.model.orthogonal_map={theirs}."
    )
  pairs = ((weights.model, weights.objective), (model, objective))
  return configs.differences(*(_encoder_options(*pair) for pair in pairs))


def _encoder_options(
  section: Mapping[str, Any], objective: str
) -> dict[str, Any]:
  """Returns the options of a model, of its mixer in full, without its head."""
  options = models.resolve_defaults({"model": section})["model"]
  if objective in NEXT:
    options["mixer"] = {"causal": True, **options.get("mixer", {})}
  return {k: v for k, v in options.items() if k not in (*PLAIN_HEAD, "pool")}


def read_record(workdir: Path) -> dict[str, Any] | None:
  """Returns what a run began with; None if it began from its seed."""
  if not (workdir / RECORD).exists():
    return None
  return workdirs.read(workdir, RECORD)


def describe(record: Mapping[str, Any]) -> str:
  """Returns a record as lines for people."""
  where = record["folder"]
  if "step" in record:
    kind = f" ({record['protocol']})" if record.get("protocol") else ""
    where += f", step {record['step']} of {record['model']} on "
    where += f"{record['task']}{kind}"
  lines = [f"Begins with {record['taken']} arrays of {where}."]
  titles = {"new": "New", "resized": "Resized", "differing_options": "Differs"}
  lines += [
    f"{title}: {', '.join(record[key])}."
    for key, title in titles.items()
    if record.get(key)
  ]
  return "\n".join(lines)
