"""Tasks by name: splits, sizes and protocols, in NumPy alone."""

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


def get(name: str, **options: object) -> Task:
  """The task of a name; an unknown name or option lists the choices."""
  return call(f"task {name!r}", TASKS[name], options)
