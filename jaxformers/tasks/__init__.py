"""Tasks by name: splits, sizes and protocols, in NumPy alone."""

from jaxformers import ranges
from jaxformers.registry import call
from jaxformers.tasks import (
  image,
  language,
  listops,
  pathfinder,
  retrieval,
  segmentation,
  short,
  text,
  vision,
)
from jaxformers.tasks.task import TASKS, Task

__all__ = [
  "TASKS",
  "Task",
  "get",
  "image",
  "language",
  "listops",
  "pathfinder",
  "retrieval",
  "segmentation",
  "short",
  "text",
  "vision",
]


def get(name: str = "", **options: object) -> Task:
  """Returns the task of a name.

  Raises:
    UserError: for an unknown name or option, with the choices; for an option
      out of its range.
  """
  values = {key: value for key, value in options.items() if value is not None}
  ranges.check({"task": {"name": name, **values}})
  return call(f"task {name!r}", TASKS[name], options)
