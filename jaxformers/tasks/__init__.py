"""Tasks by name: splits, sizes and protocols, in NumPy alone.

Importing this package imports every module in its folder, so a new file that
registers a task needs no entry anywhere else.
"""

import importlib
import pkgutil

from jaxformers import ranges
from jaxformers.errors import UserError
from jaxformers.registry import call
from jaxformers.tasks.arrays import from_arrays
from jaxformers.tasks.reconstruction import reconstruct
from jaxformers.tasks.task import TASKS, Task

__all__ = ["TASKS", "Task", "from_arrays", "get"]

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")


# Options of every task of sequences, for pre-training on its inputs.
PRETRAINING = ("objective", "mask_rate", "targets")


def get(name: str = "", **options: object) -> Task:
  """Returns the task of a name.

  Args:
    name: name of a registered task.
    **options: keyword arguments of the function that is registered; and
      `objective`, "masked" or "causal", for the task of predicting its inputs,
      with `mask_rate` and `targets`: see `reconstruction.reconstruct`.

  Raises:
    UserError: for an unknown name or option, with the choices; for an option
      out of its range.
  """
  values = {key: value for key, value in options.items() if value is not None}
  ranges.check({"task": {"name": name, **values}})
  # An empty value stands for the task without pre-training, as None does.
  pretraining = {key: options.pop(key, None) for key in PRETRAINING}
  task = call(f"task {name!r}", TASKS[name], options)
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
