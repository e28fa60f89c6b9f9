"""Models of runs that have been trained, from their workdirs alone."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformers import config as configs
from jaxformers import models
from jaxformers.commands import cli
from jaxformers.config import ModelFields, RunConfig
from jaxformers.foundations import paths, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call, choose
from jaxformers.models import Model
from jaxformers.models.variables import make_variables, outputs
from jaxformers.recipes import zoo
from jaxformers.tasks import STATISTICS, Task, normalise
from jaxformers.training import origin
from jaxformers.training.run import Run, open_trained_run


@dataclasses.dataclass(frozen=True)
class Trained:
  """A trained model with its task.

  Attributes:
    config: config of the run.
    task: task with its splits.
    model: model of the run, applied with `params`.
    params: parameters of the best checkpoint.
    step: step of that checkpoint.
    make_start: returns the parameters that the run began with, or raises
      UserError if they cannot be had any more; see `start`.
    workdir: workdir of the run.
  """

  config: RunConfig
  task: Task
  model: Model
  params: Any
  step: int
  make_start: Callable[[], Any] = lambda: None
  workdir: Path = Path()

  @functools.cached_property
  def start(self) -> Any:
    """Parameters that the run began with; None if they cannot be had any more.

    Those of `config.pretrained`, if it names any, are read at the first use.
    """
    try:
      return self.make_start()
    except UserError:
      return None

  def apply(self, batch_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the model in evaluation as a function, compiled once.

    Args:
      batch_size: inputs at a time; the last batch repeats its last input.

    Returns:
      A function from any number of float32 inputs [k, ...] to outputs [k, ...].
    """
    variables = make_variables(self.model, self.params)
    forward = functools.partial(outputs, self.model, variables)
    return lambda x: apply_in_batches(forward, x, batch_size)

  def sample(
    self, count: int, length: int, split: str = "test", seed: int = 0
  ) -> np.ndarray:
    """Draws examples of a split: ids [count, (2,) n], cut to `length`.

    They are drawn without repetition, by a generator of `seed`; all of the
    split if it has fewer. n is `length` or the task's greatest.

    Raises:
      UserError: for less than one example or token, or an unknown split.
    """
    if count < 1 or length < 1:
      raise UserError(
        f"{count} samples of {length} tokens: give at least one of both, by "
        "--samples and --length."
      )
    source = self.task.splits[choose("split", split, self.task.splits)]
    rng = np.random.default_rng(seed)
    count = min(count, len(source))
    # Sorted, because that is the order in which examples lie on disk.
    chosen = np.sort(rng.choice(len(source), count, replace=False))
    return source.batch(chosen, min(length, self.task.max_len))["inputs"]


def apply_in_batches(
  forward: Callable[[np.ndarray], Any], x: np.ndarray, batch_size: int
) -> np.ndarray:
  """Returns the outputs of a compiled function for any number of inputs.

  Every batch has the same size, so that one program serves all.

  Args:
    forward: function of inputs [batch_size, ...].
    x: inputs, [k, ...].
    batch_size: inputs at a time; see `in_batches`.
  """
  batches = in_batches(x, batch_size)
  return np.concatenate([np.asarray(forward(b)) for b in batches])[: len(x)]


def in_batches(x: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
  """Yields x [k, ...] `batch_size` at a time, the last repeated to fill up."""
  for start in range(0, len(x), batch_size):
    rows = np.arange(start, start + batch_size)
    yield x[np.minimum(rows, len(x) - 1)]


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
  run: Trained,
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
) -> Trained:
  """Returns the model of a run with the parameters of its best checkpoint.

  The other arguments give it other parameters, or these to another model, on
  the task of the run: a softmax model as NeuTRENO, without training, is
  model="neutreno", options="mixer.fidelity=0.6".

  Args:
    workdir: folder of the run.
    untrained: True for the parameters that the run began with.
    pretrained: folder of other weights, as `config.pretrained`; the run's own
      if `model` or `options` are given alone.
    model: name of a model in place of the run's.
    options: options of the model that differ, "NAME=VALUE,...", those of a
      section as mixer.NAME.

  Raises:
    UserError: if there is no run, if the `config.json` is of another program,
      if no checkpoint was evaluated, or if other weights do not fit.
  """
  if str(workdir).startswith(zoo.PREFIX):
    raise UserError(
      f"{workdir} is a model without a run and its data: open it in Python, "
      f"jaxformers.load({str(workdir)!r}), or give the workdir of a run."
    )
  # The first state gives shapes and placement of what is restored.
  run = open_trained_run(Path(workdir).absolute())
  start = run.layout.place_state(run.initial_state())
  is_other = bool(pretrained or model or options)
  if is_other and untrained:
    raise UserError(
      "--untrained is the start of a run, and --pretrained, --model and "
      "--options give weights to a model: choose one."
    )
  if is_other:
    return _with_weights(run, pretrained or workdir, model, options)
  with run.checkpoints() as checkpoints:
    best = checkpoints.restore_best(start)
  make_start = functools.partial(_first_params, run, start.params)
  return Trained(
    run.config,
    run.task,
    run.model,
    make_start() if untrained else best.state.scored,
    0 if untrained else best.step,
    make_start=make_start,
    workdir=run.workdir,
  )


def _first_params(run: Run, initial: Any) -> Any:
  """Returns the parameters that a run began with.

  Args:
    run: run that has been trained.
    initial: parameters that its seed gives.

  Raises:
    UserError: if the run began with other weights, which have changed since, or
      which cannot be read.
  """
  folder = run.config.pretrained
  if not folder:
    return initial
  section = run.config.model.as_dict()
  params, record = origin.begin_with(folder, initial, section, run.task)
  before = origin.read_record(run.workdir)
  if before and record["sha256"] != before["sha256"]:
    raise UserError(
      f"{folder} holds other weights than those that {run.workdir} began with: "
      "restore them, or leave --untrained out."
    )
  return params


def _with_weights(
  run: Run, folder: str | Path, name: str, options: str
) -> Trained:
  """Returns a model on the task of a run, with the weights of a folder."""
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
  task = normalise(run.task, **statistics) if run.task.image else run.task
  params, record = origin.begin_with(folder, start, section, task)
  return Trained(
    dataclasses.replace(run.config, model=model_fields),
    task,
    model,
    params,
    record.get("step", 0),
    make_start=lambda: start,
    workdir=run.workdir,
  )
