"""Weights that commands load for a run, and scores that they record."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformers import config as configs
from jaxformers import models
from jaxformers.analysis.plotting import figures
from jaxformers.config import ModelFields
from jaxformers.foundations import cli, paths, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call
from jaxformers.inference import TrainedModel, load_run
from jaxformers.models import capture
from jaxformers.tasks import STATISTICS, Task, normalise
from jaxformers.training import origin
from jaxformers.training.run import first_params

# Arguments of commands that measure a run. `load` takes them.
STATE = (
  cli.switch("--untrained", help="use the initial parameters of the run"),
  cli.option(
    "pretrained",
    "",
    "folder of other weights for the model: a run, an exported model, or a "
    "folder of Hugging Face",
  ),
  cli.option("model", "", "name of another model to load the weights into"),
  cli.argument(
    "--options",
    default="",
    metavar="NAME=VALUE,...",
    help="other values of options of the model, such as mixer.fidelity=0.6",
  ),
)


def take_state(options: dict[str, Any]) -> dict[str, Any]:
  """Removes the arguments `STATE` from a command's options; returns them."""
  names = ("untrained", "pretrained", "model", "options")
  return {name: options.pop(name) for name in names}


SPLIT = cli.option("split", "test", "split of the task")


def states(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the states of a run that a command compares.

  The first state is the best checkpoint. If the arguments ask for them, the
  initial parameters follow, and then other weights or another model.

  Args:
    arguments: values of `STATE`.

  Returns:
    Keyword arguments of `load` for each state.
  """
  best = {"untrained": False, "pretrained": "", "model": "", "options": ""}
  compared = [best]
  if arguments["untrained"]:
    compared.append({**best, "untrained": True})
  other = {**arguments, "untrained": False}
  return compared if other == best else [*compared, other]


class Draw(NamedTuple):
  """Examples of a state of a run; see `Draws`.

  Attributes:
    label: Label of the state in tables and figures.
    seed: Number of the folder among the seeds of the run, from 0.
    folder: Workdir of the seed.
    state: Keyword arguments of `load`.
    run: The loaded model.
    batch: Arrays by name, as of `TrainedModel.draw`.
  """

  label: str
  seed: int
  folder: Path
  state: dict[str, Any]
  run: TrainedModel
  batch: dict[str, np.ndarray]


@dataclasses.dataclass
class Draws:
  """Examples for every state and every seed of runs.

  Seeds of a run, in the folders seed_0, seed_1 and so on of its workdir, have
  one label.

  Attributes:
    workdirs: Workdirs of the runs.
    arguments: Values of `STATE`.
    samples: Number of examples for each model.
    length: Largest number of tokens of an example.
    split: Split of the examples.
    seed: Seed of the draw.
    caption: What was drawn, in words; complete after the iteration.
  """

  workdirs: Sequence[Path]
  arguments: Mapping[str, Any]
  samples: int
  length: int
  split: str
  seed: int = 0
  caption: str = dataclasses.field(default="", init=False)

  def __iter__(self) -> Iterator[Draw]:
    """Yields the draws in the order of workdirs, states and seeds."""
    seeds, sizes, lengths = set(), set(), set()
    # Load all runs first: an error ends the command before it measures.
    loaded = []
    for workdir in self.workdirs:
      folders = sorted(workdir.glob("seed_*")) or [workdir]
      seeds.add(len(folders))
      for state in states(self.arguments):
        for number, folder in enumerate(folders):
          run = load(folder, **state)
          name = label(workdir, state)
          loaded.append(Draw(name, number, folder, state, run, {}))
    for each in loaded:
      run = each.run
      batch = run.draw(self.samples, self.length, self.split, self.seed)
      sizes.add(len(batch["inputs"]))
      lengths.add(capture.num_tokens(run.model, batch["inputs"]))
      yield each._replace(batch=batch)
    self.caption = figures.describe_data(sizes, lengths, seeds, self.split)


def label(workdir: Path, state: Mapping[str, Any]) -> str:
  """Returns the label of a state of a run in tables and figures."""
  return ", ".join(filter(None, [str(workdir), describe(state)]))


def describe(state: Mapping[str, Any]) -> str:
  """Describes a state in words, for a label; "" for the best checkpoint.

  Args:
    state: keyword arguments of `load`.
  """
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

  Nothing is written if the run is not finished, if the weights are not the
  run's, or if no score is finite. If the workdir cannot be written to, a
  message on stderr names it.

  Args:
    run: run that was scored.
    workdir: workdir of the run.
    state: keyword arguments of `load`; see `STATE`.
    command: name of the command that computed the scores.
    scores: scores by name.
    examples: number of examples that were scored.
    **how: settings with which the scores were computed, as plain JSON.
  """
  # Keep finite scores, and check that they belong to a finished run.
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
    print(f"The scores were not saved: {error}", file=sys.stderr)


def load(
  workdir: str | Path,
  *,
  untrained: bool = False,
  pretrained: str | Path = "",
  model: str = "",
  options: str = "",
) -> TrainedModel:
  """Loads the model of a run with the parameters of its best checkpoint.

  `pretrained` replaces the weights. `model` and `options` load the weights into
  another architecture. The task of the run stays. For example,
  model="neutreno", options="mixer.fidelity=0.6" turns a softmax model into
  NeuTRENO without training.

  Args:
    workdir: folder of the run.
    untrained: True for the initial parameters of the run.
    pretrained: folder of other weights, as in `config.pretrained`; "" for the
      weights of the run.
    model: name of another model; "" for the model of the run.
    options: other values of options of the model, as "NAME=VALUE,...". An
      option of a section is written as mixer.NAME.

  Raises:
    UserError: if there is no run, if another program wrote the `config.json`,
      if no checkpoint was evaluated, or if other weights do not fit.
  """
  is_other = bool(pretrained or model or options)
  if is_other and untrained:
    raise UserError(
      "--untrained loads the initial parameters, but --pretrained, --model and "
      "--options load trained weights: choose one."
    )
  trained = load_run(workdir)
  if untrained:
    return _replace(trained, params=first_params(trained.run), step=0)
  if is_other:
    return _with_weights(trained, pretrained or workdir, model, options)
  return trained


def _set_options(section: dict[str, Any], options: str) -> None:
  """Sets options, "name=value,...", in the section of a model."""
  # Commas inside brackets do not separate options.
  for item in filter(None, re.split(r",(?![^(\[]*[)\]])", options)):
    path, equals, value = item.partition("=")
    if not equals or not path:
      raise UserError(
        f"--options={options}: write NAME=VALUE,..., such as "
        "mixer.fidelity=0.6."
      )
    # Follow the path to the section of the option.
    *parents, key = path.split(".")
    owner = section
    for part in parents:
      owner = owner.setdefault(part, {})
      if not isinstance(owner, dict):
        raise UserError(
          f"--options={options}: {part} is no section: write {part}=VALUE."
        )
    owner[key] = configs.parse_value(value)


def _with_weights(
  trained: TrainedModel, folder: str | Path, name: str, options: str
) -> TrainedModel:
  """Returns a model on the task of a run, with the weights of a folder.

  Args:
    trained: model of the run.
    folder: folder of the weights.
    name: name of the model; "" for the model of the run.
    options: other values of options of the model.
  """
  run = trained.run
  section = run.config.model.as_dict()
  section["name"] = name or section["name"]
  _set_options(section, options)
  # Build the model with initial parameters.
  model_fields = call("config.model", ModelFields, section)
  model = models.build(**vars(model_fields), **run.task.sizes())
  init = jax.jit(lambda key: model.init(key, model.example(), train=False))
  start = init(jax.random.key(run.config.seed))["params"]
  # Normalise pixels by the statistics that the weights were trained with.
  fields = origin.read_fields(paths.expand(folder).absolute())
  statistics = {name: fields.get(f"task.{name}", ()) for name in STATISTICS}
  normalise_task = functools.partial(_normalise_pixels, statistics)
  task = normalise_task(run.task)
  # Load the weights into the model.
  params, record = origin.begin_with(folder, start, section, task)
  if record.get("differing_options"):
    print(origin.describe(record), file=sys.stderr)
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
  """Returns a task with pixels normalised by statistics, if it has images."""
  return normalise(task, **statistics) if task.image else task


def _replace(trained: TrainedModel, **fields: Any) -> TrainedModel:
  """Returns a model with other weights that shares the opened run."""
  # Remove the results, which belong to the weights of the run.
  changed = dataclasses.replace(trained, results={}, **fields)
  # Share the run by setting the cached value of the property `run`.
  vars(changed)["run"] = trained.run
  return changed
