"""Tasks by name: splits, sizes and protocols, in NumPy alone.

Importing this package imports every module in its folder, so a new file that
registers a task needs no entry anywhere else.
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
from jaxformers.tasks.reconstruction import reconstruct
from jaxformers.tasks.task import TASKS, Task

__all__ = ["TASKS", "Task", "from_arrays", "get", "normalise"]

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")


# Options of every task of sequences, for pre-training on its inputs.
PRETRAINING = ("objective", "mask_rate", "targets")
# Options of every task of images: statistics that normalise its pixels.
STATISTICS = ("mean", "deviation")


def get(name: str = "", **options: object) -> Task:
  """Returns the task of a name.

  Args:
    name: name of a registered task.
    **options: keyword arguments of the function that is registered; and
      `objective`, "masked" or "causal", for the task of predicting its inputs,
      with `mask_rate` and `targets`: see `reconstruction.reconstruct`; and
      `mean` and `deviation` for images: see `normalise`.

  Raises:
    UserError: for an unknown name or option, with the choices; for an option
      out of its range.
  """
  check_ranges(name, options, "task")
  options = {key: value for key, value in options.items() if value is not None}
  # An empty value stands for the task without pre-training, as None does.
  pretraining = {key: options.pop(key, None) for key in PRETRAINING}
  statistics: list[Any] = [options.pop(key, None) or () for key in STATISTICS]
  task = call(f"task {name!r}", TASKS[name], options)
  task = normalise(task, *statistics)
  chosen = {key: value for key, value in pretraining.items() if value}
  if not chosen:
    return task
  if "objective" not in chosen:
    fields = ", ".join(f"config.task.{key}" for key in chosen)
    raise UserError(
      f"{fields} is for pre-training: set config.task.objective to masked or "
      "causal, or leave it out."
    )
  return call(f"task {name!r}", reconstruct, {"task": task, **chosen})


def check_ranges(name: str, options: Mapping[str, Any], path: str) -> None:
  """Raises UserError for an unknown task, or an option out of its range.

  Args:
    name: name of the task.
    options: options as for `get`; None stands for the default.
    path: path of the options, for messages.
  """
  values = {key: value for key, value in options.items() if value is not None}
  # Examples given in Python are of no registered task.
  own = language.from_texts if name == arrays.NAME else TASKS[name]
  for owner in (own, reconstruct, normalise):
    ranges.check(owner, values, path)
  ranges.check(Augment, values.get("augment", {}), f"{path}.augment")


def normalise(
  task: Task,
  mean: Sequence[Annotated[float, Interval("[-1000, 1000]")]] = (),
  deviation: Sequence[Factor] = (),
) -> Task:
  """Returns a task of images whose pixels are normalised by other statistics.

  Args:
    task: task of images.
    mean, deviation: statistics of each channel, of pixels in [0, 1], such as
      a model has that was trained elsewhere; () to keep the task's.

  Raises:
    UserError: for a task of sequences, or another number of channels.
  """
  if not mean and not deviation:
    return task
  statistics = {"mean": tuple(mean), "deviation": tuple(deviation)}
  statistics = {name: value for name, value in statistics.items() if value}
  if not task.image:
    raise UserError(
      f"task.{next(iter(statistics))} normalises images, and {task.name} has "
      "sequences: leave it out."
    )
  for name, values in statistics.items():
    if len(values) != task.image[-1]:
      raise UserError(
        f"task.{name}={list(values)} is for {len(values)} channels, and images "
        f"have {task.image[-1]}: give one number a channel."
      )
  splits = {
    name: dataclasses.replace(split, **statistics)
    for name, split in task.splits.items()
  }
  return dataclasses.replace(task, splits=splits)
