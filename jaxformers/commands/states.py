"""Weights that commands measure a run with, and scores that they keep."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxformers import config as configs
from jaxformers import models
from jaxformers.config import ModelFields
from jaxformers.foundations import cli, paths, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call
from jaxformers.inference import TrainedModel, load_run
from jaxformers.tasks import STATISTICS, Task, normalise
from jaxformers.training import origin
from jaxformers.training.run import first_params

# Arguments of commands that measure a run, for `load`.
STATE = (
  cli.switch(
    "--untrained", help="the parameters that the run began its training with"
  ),
  cli.option(
    "pretrained",
    "",
    "other weights in the model: a run, an exported model, or a folder of "
    "Hugging Face",
  ),
  cli.option("model", "", "name of another model for the weights"),
  cli.argument(
    "--options",
    default="",
    metavar="NAME=VALUE,...",
    help="options of the model that differ, such as mixer.fidelity=0.6",
  ),
)


def take_state(options: dict[str, Any]) -> dict[str, Any]:
  """Removes the arguments `STATE` from those of a command, and returns them."""
  names = ("untrained", "pretrained", "model", "options")
  return {name: options.pop(name) for name in names}


SPLIT = cli.option("split", "test", "split of the task")


def states(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the states of a run that a command compares, for `load`.

  The run as it was trained comes first; then its untrained start, and its model
  with other weights or of another name, if the arguments ask for them.

  Args:
    arguments: values of `STATE`.
  """
  best = {"untrained": False, "pretrained": "", "model": "", "options": ""}
  compared = [best]
  if arguments["untrained"]:
    compared.append({**best, "untrained": True})
  other = {**arguments, "untrained": False}
  return compared if other == best else [*compared, other]


def describe(state: Mapping[str, Any]) -> str:
  """Returns arguments of `load` in words, for a label; "" for the run's own."""
  if state["untrained"]:
    return "untrained"
  parts = [f"as {state['model']}" if state["model"] else ""]
  parts.append(f"with {state['pretrained']}" if state["pretrained"] else "")
  return " ".join(filter(None, [*parts, state["options"]]))


def record(
  run: TrainedModel,
  workdir: str | Path,
  state: Mapping[str, Any],
  command: str,
  scores: Mapping[str, float],
  examples: int,
  **how: Any,
) -> None:
  """Adds scores to the `scores.json` of a finished run, for `published`.

  Nothing is written for weights that are not the run's, or for scores that are
  not finite. A workdir that cannot be written to is named on stderr.

  Args:
    run: run that was scored.
    workdir: its workdir.
    state: arguments of `load`, see `STATE`.
    command: name of the command that computed the scores.
    scores: scores by name.
    examples: number of examples that were scored.
    **how: how they were made, as plain JSON.
  """
  finite = {k: float(v) for k, v in scores.items() if math.isfinite(v)}
  is_finished = (Path(workdir) / "results.json").exists()
  if describe(state) or not is_finished or not finite:
    return
  entry = {
    "command": command,
    "how": how,
    "step": run.step,
    "examples": examples,
    "scores": finite,
  }
  try:
    workdirs.add_score(Path(workdir), entry)
  except (OSError, UserError) as error:
    print(f"The scores are not kept: {error}", file=sys.stderr)


def load(
  workdir: str | Path,
  *,
  untrained: bool = False,
  pretrained: str | Path = "",
  model: str = "",
  options: str = "",
) -> TrainedModel:
  """Returns the model of a run with the parameters of its best checkpoint.

  The other arguments give it other parameters, or these to another model, on
  the task of the run: a softmax model as NeuTRENO, without training, is
  model="neutreno", options="mixer.fidelity=0.6".

  Args:
    workdir: folder of the run.
    untrained: True for the parameters that the run began with.
    pretrained: folder of other weights, as `config.pretrained`; those of the
      run if only `model` or `options` are given.
    model: name of a model that replaces that of the run.
    options: options of the model that differ, "NAME=VALUE,...", those of a
      section as mixer.NAME.

  Raises:
    UserError: if there is no run, if the `config.json` is of another program,
      if no checkpoint was evaluated, or if other weights do not fit.
  """
  is_other = bool(pretrained or model or options)
  if is_other and untrained:
    raise UserError(
      "--untrained is the start of a run, and --pretrained, --model and "
      "--options give weights to a model: choose one."
    )
  trained = load_run(workdir)
  if untrained:
    return _replace(trained, params=first_params(trained.run), step=0)
  if is_other:
    return _with_weights(trained, pretrained or workdir, model, options)
  return trained


def _with_weights(
  trained: TrainedModel, folder: str | Path, name: str, options: str
) -> TrainedModel:
  """Returns a model on the task of a run, with the weights of a folder."""
  run = trained.run
  section = run.config.model.as_dict()
  section["name"] = name or section["name"]
  # Commas in brackets do not separate options.
  for item in filter(None, re.split(r",(?![^(\[]*[)\]])", options)):
    path, equals, value = item.partition("=")
    if not equals or not path:
      raise UserError(
        f"--options={options}: write NAME=VALUE,..., such as "
        "mixer.fidelity=0.6."
      )
    *parents, key = path.split(".")
    owner = section
    for part in parents:
      owner = owner.setdefault(part, {})
    owner[key] = configs.parse_value(value)
  model_fields = call("config.model", ModelFields, section)
  model = models.build(**vars(model_fields), **run.task.sizes())
  init = jax.jit(lambda key: model.init(key, model.example(), train=False))
  start = init(jax.random.key(run.config.seed))["params"]
  # Pixels are normalised as those that the weights were trained on.
  fields = origin.read_fields(paths.expand(folder).absolute())
  statistics = {name: fields.get(f"task.{name}", ()) for name in STATISTICS}
  normalise_task = functools.partial(_normalise_pixels, statistics)
  task = normalise_task(run.task)
  params, record = origin.begin_with(folder, start, section, task)
  changed = _replace(
    trained,
    config=model_fields.as_dict(),
    model=model,
    params=params,
    step=record.get("step", 0),
    normalise=normalise_task,
  )
  vars(changed)["start"] = start
  return changed


def _normalise_pixels(statistics: Mapping[str, Any], task: Task) -> Task:
  """Returns a task whose pixels are normalised as given, if it has images."""
  return normalise(task, **statistics) if task.image else task


def _replace(trained: TrainedModel, **fields: Any) -> TrainedModel:
  """Returns a model with other weights on the same, opened, run."""
  # The results of the run are those of its own weights.
  changed = dataclasses.replace(trained, results={}, **fields)
  vars(changed)["run"] = trained.run  # Where `cached_property` keeps it.
  return changed
