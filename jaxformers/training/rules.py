"""Scores of trivial rules, which are fitted once per data set and stored."""

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

  Fitting can take minutes, for example for a linear rule on all pixels of
  CIFAR-10. The scores are therefore stored in the data folder, under the
  digests of the data and the version of the package.

  Args:
    task: task whose `trivial` rules are scored.
    data_dir: folder of the data, as in `config.data_dir`.
    say: function that shows a line; it is called before rules are fitted.
  """
  # The key identifies the rules, the data and the version.
  names = sorted(task.trivial)
  key = {**task.description(), "rules": names, "version": __version__}
  key["scoring"] = task.splits["test"].scoring()
  name = f"{workdirs.digest(key)}.json"
  # Return the stored scores, if there are any.
  folder = None
  with contextlib.suppress(UserError, OSError):
    folder = data_folder(data_dir) / "rules"
    return workdirs.read_verified(folder, name)["scores"]
  say(f"Fitting {', '.join(names)}, once for these data.")
  fitted = task.baselines()
  # If the folder cannot be written, the next run fits the rules again.
  if folder and processes.is_first():
    with contextlib.suppress(OSError):
      folder.mkdir(parents=True, exist_ok=True)
      workdirs.write(folder, name, {"scores": fitted})
  return fitted
