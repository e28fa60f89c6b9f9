"""Tasks by name: splits, sizes and protocols, in NumPy alone.

Importing this package imports every module in its folder, so a new file that
registers a task needs no entry anywhere else.
"""

import importlib
import pkgutil

from jaxformers import ranges
from jaxformers.registry import call
from jaxformers.tasks.task import TASKS, Task

__all__ = ["TASKS", "Task", "get"]

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")


def get(name: str = "", **options: object) -> Task:
  """Returns the task of a name.

  Args:
    name: name of a registered task.
    **options: keyword arguments of the function that is registered.

  Raises:
    UserError: for an unknown name or option, with the choices; for an option
      out of its range.
  """
  values = {key: value for key, value in options.items() if value is not None}
  ranges.check({"task": {"name": name, **values}})
  return call(f"task {name!r}", TASKS[name], options)
