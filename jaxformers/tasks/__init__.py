"""Tasks by name: splits, sizes and protocols, in NumPy, without JAX.

Importing this package imports every module in its folder. A new file that
registers a task therefore needs no entry anywhere else.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxformers.data.images.augment import Augment
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Factor, Interval
from jaxformers.foundations.registry import call
from jaxformers.tasks import arrays, language
from jaxformers.tasks.arrays import from_arrays
from jaxformers.tasks.deletion import delete
from jaxformers.tasks.reconstruction import reconstruct
from jaxformers.tasks.task import TASKS, Task

__all__ = [
  "TASKS",
  "Task",
  "delete",
  "from_arrays",
  "get",
  "normalise",
  "resolve_defaults",
]

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")


# Options of every task of sequences for pre-training on its inputs.
PRETRAINING = ("objective", "mask_rate", "targets")
# Option of every task of texts, to delete tokens at random.
DELETION = "deletion"
# Options of every task of images: statistics that normalise pixels.
STATISTICS = ("mean", "deviation")


def get(name: str = "", **options: object) -> Task:
  """Returns the task with a name.

  Args:
    name: name of a registered task.
    **options: keyword arguments of the registered function. Every task of
      sequences also takes `objective`, "masked" or "causal", `mask_rate` and
      `targets`, to predict its own inputs; see `reconstruction.reconstruct`;
      and those that classify one sequence of ids take `deletion`; see
      `deletion.delete`.
      Every task of images also takes `mean` and `deviation`; see `normalise`.

  Raises:
    UserError: for an unknown name or option, with the choices; for an option
      out of its range.
  """
  # Check the options; None stands for the default.
  check_ranges(name, options, "task")
  options = {key: value for key, value in options.items() if value is not None}
  # Set the options aside that apply to every task; empty values mean the
  # default.
  pretraining = {key: options.pop(key, None) for key in PRETRAINING}
  statistics: list[Any] = [options.pop(key, None) or () for key in STATISTICS]
  deletion: Any = options.pop(DELETION, 0.0)
  # Make the task, and normalise its images.
  task = call(f"task {name!r}", TASKS[name], options)
  task = normalise(task, *statistics)
  # Replace the task by pre-training on its inputs, or by texts with fewer
  # tokens, if one of them is chosen; `delete` refuses both.
  chosen = {key: value for key, value in pretraining.items() if value}
  if chosen and "objective" not in chosen:
    fields = ", ".join(f"config.task.{key}" for key in chosen)
    raise UserError(
      f"{fields} is for pre-training: set config.task.objective to masked or "
      "causal, or remove the option."
    )
  if chosen:
    task = call(f"task {name!r}", reconstruct, {"task": task, **chosen})
  return delete(task, deletion)


def resolve_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a run's config with the defaults of options that its task lacks.

  Then a config from before its task had an option is equal to one with the
  default of this option.
  """
  options = config.get("task", {})
  # Data that are passed in Python have no registered loader.
  load = TASKS.data.get(options.get("name"))
  defaults = getattr(load, "__kwdefaults__", None) or {}
  return {**config, "task": {**defaults, **options}}


def check_ranges(name: str, options: Mapping[str, Any], path: str) -> None:
  """Raises UserError for an unknown task, or an option out of its range.

  Args:
    name: name of the task.
    options: options of `get`; None stands for the default.
    path: path of the options, for messages.
  """
  values = {key: value for key, value in options.items() if value is not None}
  # Data that are passed in Python have no registered loader.
  loader = language.from_texts if name == arrays.NAME else TASKS[name]
  for owner in (loader, reconstruct, normalise, delete):
    ranges.check(owner, values, path)
  ranges.check(Augment, values.get("augment", {}), f"{path}.augment")


def normalise(
  task: Task,
  mean: Sequence[Annotated[float, Interval("[-1000, 1000]")]] = (),
  deviation: Sequence[Factor] = (),
) -> Task:
  """Returns a task of images with other statistics of normalisation.

  A pretrained model may need these, if it was trained with other statistics.

  Args:
    task: task of images.
    mean, deviation: mean and deviation of each channel, for pixels in [0, 1];
      () to keep the statistics of the task.

  Raises:
    UserError: for a task of sequences, or a wrong number of channels.
  """
  if not mean and not deviation:
    return task
  statistics = {"mean": tuple(mean), "deviation": tuple(deviation)}
  statistics = {name: value for name, value in statistics.items() if value}
  if not task.image:
    raise UserError(
      f"task.{next(iter(statistics))} normalises images, but {task.name} has "
      "sequences: remove the option."
    )
  for name, values in statistics.items():
    if len(values) != task.image[-1]:
      raise UserError(
        f"task.{name}={list(values)} is for {len(values)} channels, but images "
        f"have {task.image[-1]}: give one number per channel."
      )
  # Replace the statistics of every split.
  splits = {
    name: dataclasses.replace(split, **statistics)
    for name, split in task.splits.items()
  }
  return dataclasses.replace(task, splits=splits)
