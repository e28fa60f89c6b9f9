r"""Training of every model for a few hundred steps, in float32 and bfloat16.

python -m benchmarks.training --steps 200 --out training.json

The table has the mean training loss of the first tenth and of the last tenth of
the steps, and the time of a step. The task is ListOps at size=tiny, with short
expressions of 51 to 249 tokens, so that two cores suffice. The entropy of the
classes is the loss of a model that ignores the tokens; the classes are not
equally frequent.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import OUT, Row, report
from benchmarks.timing import ready, timed
from jaxformers import config as configs
from jaxformers.foundations import cli
from jaxformers.models import MODELS
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer

TASK = {"min_length": 50, "max_length": 250}
TASK |= {"num_train": 10_000, "num_validation": 500, "num_test": 500}
DTYPES = ("float32", "bfloat16")


def make_config(name: str, steps: int, folder: Path, **model: Any) -> Any:
  """Returns the config of a short run on ListOps.

  Args:
    name: name of the model.
    steps: number of steps of the run.
    folder: folder for the generated expressions.
    **model: fields of `config.model`.
  """
  config = configs.load(f"configs/lra/listops.py:size=tiny,model={name}")
  # Batches of one length, so that the step is compiled once.
  config.update(data_dir=str(folder), total_steps=steps)
  config.update(batch_size=16, buckets=1)
  config.schedule.warmup_steps = steps // 10
  config.task.update(TASK)
  config.model.update(model)
  return config


def train_to_end(run: Trainer) -> tuple[list[float], list[float]]:
  """Trains to the end of a run; returns the loss and time of each step."""
  losses, seconds = [], []
  # Time each step until its results are ready.
  for batch in run.batches(0):
    (run.state, sums), spent = timed(ready(run.train_step, run.state, batch))
    losses.append(float(sums["loss"]) / float(sums["count"]))
    seconds.append(spent)
  return losses, seconds


def average_tenths(losses: list[float]) -> tuple[float, float]:
  """Returns the means of the first tenth and of the last tenth of losses."""
  tenth = max(1, len(losses) // 10)
  return statistics.mean(losses[:tenth]), statistics.mean(losses[-tenth:])


def train_model(name: str, dtype: str, steps: int, folder: Path) -> Row:
  """Trains a model and returns its losses as a row."""
  config = make_config(name, steps, folder, dtype=dtype)
  with tempfile.TemporaryDirectory() as workdir:
    run = Trainer(open_run(config, Path(workdir)))
    losses, seconds = train_to_end(run)
  # Entropy of the classes, the loss of a model that ignores the tokens.
  labels = np.bincount(run.task.splits["train"].labels)
  share = labels / labels.sum()
  first, last = average_tenths(losses)
  return {
    "model": name,
    "type": dtype,
    "first tenth": first,
    "last tenth": last,
    "entropy of classes": float(-(share * np.log(share)).sum()),
    "all finite": all(math.isfinite(loss) for loss in losses),
    "falls": last < first,
    "ms per step": 1e3 * statistics.median(seconds),
  }


@cli.command(
  cli.argument("--models", default="", help="names: a,b (default: all)"),
  cli.argument("--steps", default=200, help="number of training steps"),
  OUT,
)
def main(models: str, steps: int, out: str) -> None:
  """Prints the table, and writes it as JSON if --out is set."""
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    for name in cli.names(models) or sorted(MODELS):
      for dtype in DTYPES:
        rows.append(train_model(name, dtype, steps, Path(folder)))
        # Print each row as progress; the table is printed at the end.
        print(rows[-1], file=sys.stderr)
  report([("training", rows)], out)


if __name__ == "__main__":
  main()
