"""Tasks by name: splits, sizes and protocols, in NumPy alone."""

from jaxformers.registry import call
from jaxformers.tasks import listops, text
from jaxformers.tasks.task import TASKS, Task

__all__ = ["TASKS", "Task", "get", "listops", "text"]


def get(name: str, **options: object) -> Task:
  """The task of a name; an unknown name or option lists the choices."""
  return call(f"task {name!r}", TASKS[name], options)
