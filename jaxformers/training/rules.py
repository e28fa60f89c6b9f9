"""Scores of trivial rules, which are fitted once for a data set and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from jaxformers.data.engine.preparation import data_folder
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import Task
from jaxformers.training import processes
from jaxformers.version import __version__


def scores(
  task: Task, data_dir: str, say: Callable[[str], None]
) -> dict[str, float]:
  """Returns the score of every trivial rule of a task on its test split.

  A linear rule on all pixels of CIFAR-10 takes minutes, so scores are kept in
  the folder of data, by the digests of the data and the version of the package.

  Args:
    task: task whose `trivial` rules are scored.
    data_dir: folder of data, as `config.data_dir`.
    say: function that shows a line, called before rules are fitted.
  """
  names = sorted(task.trivial)
  key = {**task.description(), "rules": names, "version": __version__}
  name = f"{workdirs.digest(key)}.json"
  folder = None
  with contextlib.suppress(UserError, OSError):
    folder = data_folder(data_dir) / "rules"
    return workdirs.read_verified(folder, name)["scores"]
  say(f"Fitting {', '.join(names)}, once for these data.")
  fitted = task.baselines()
  # Without a folder that can be written the next run fits them again.
  if folder and processes.is_first():
    with contextlib.suppress(OSError):
      folder.mkdir(parents=True, exist_ok=True)
      workdirs.write(folder, name, {"scores": fitted})
  return fitted
