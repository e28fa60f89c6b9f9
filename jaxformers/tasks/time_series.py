"""Time series of the UEA and UCR archives, one class for each series."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.series import (
  Series,
  compute_statistics,
  from_packed,
  require_numbers,
)
from jaxformers.data.sets import uea
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Length
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.splits import hold_out
from jaxformers.tasks.task import TASKS, Task

# jaxformers: the archive's own splits; a fifth of train is validation, and
# channels are normalised by train.
# linoss: all series together, without copies, are divided 70 : 15 : 15 at
# random; channels are not normalised. As in the code of LinOSS.
PROTOCOLS = ("jaxformers", "linoss")
HELD_OUT = 0.2
MIN_SERIES = 4  # Series of which every part of 70 : 15 : 15 has one.
# What a reader of scores under "linoss" has to know.
PITFALLS = (
  "Every seed draws other test series, so the deviation between seeds is not "
  "the deviation of the model only.",
  "The published code scores the test split whenever validation is at least as "
  "good as before. Its rows of Mamba and S6 are means over batches, in which "
  "the series of a short last batch count more.",
)


def mean_regression(task: Task) -> float:
  """Scores a regression on the mean and the deviation of each channel.

  These numbers do not depend on the order of the steps.
  """

  def features(split: Series) -> np.ndarray:
    rows = []
    for k in range(len(split)):
      steps = np.ma.masked_invalid(split[k])
      moments = [steps.mean(0), steps.std(0)]
      rows.append(np.concatenate([m.filled(0) for m in moments]))
    return np.asarray(rows, np.float64)

  return baselines.regression(task, features, penalty=0.1)


RULES = baselines.MAJORITY | {
  "regression on means and deviations": mean_regression
}


@TASKS.register("time_series")
def load_time_series(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  problem: str = "BasicMotions",
  include_time: bool = False,
  seed: Count = 0,
  max_len: Length = 0,
) -> Task:
  """Opens a data set of the UEA or UCR archive; inputs are [b, n, channels].

  Series of unequal lengths are padded, and steps without any number are
  masked. Single missing numbers are 0 after normalisation.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": the archive's train and test; a fifth of train is
      validation, and train's mean and deviation normalise each channel.
      "linoss": train and test together, without copies, are divided
      70 : 15 : 15 by the seed, and not normalised. NumPy draws the splits; the
      authors' code draws others.
    archive: folder that holds PROBLEM_TRAIN.ts and PROBLEM_TEST.ts at any
      depth; "" searches for a folder of the name of the problem.
    problem: name of the data set.
    include_time: True for a first channel with the time from 0 to 1.
    seed: seed of the splits of "linoss"; 0 under other protocols.
    max_len: number of steps to which series are cut; 0 for the longest one.

  Raises:
    UserError: for damaged or missing files; for a series without numbers; for
      too few series; under "linoss" for series of unequal lengths.
  """
  choose("protocol of time_series", protocol, PROTOCOLS)
  packed, info = open_splits(
    uea.source(problem), uea.ENCODING, data_dir, archive
  )
  classes, channels = tuple(info.pop("classes")), info.pop("channels")
  splits = {
    name: dataclasses.replace(
      from_packed(split, channels), include_time=include_time
    )
    for name, split in packed.items()
  }
  remarks: tuple[str, ...] = ()
  if protocol == "linoss":
    splits, remarks = _divide(splits, problem, seed), PITFALLS
  else:
    if seed:
      raise UserError(
        f"task.seed={seed} draws the splits of protocol='linoss' only: set it "
        "to 0."
      )
    if len(splits["train"]) < 2:
      raise UserError(
        f"{problem} has one series in train, and one is needed for validation, "
        "too: choose another data set, or protocol='linoss'."
      )
    held = max(round(HELD_OUT * len(splits["train"])), 1)
    splits |= hold_out(splits["train"], held)
    mean, deviation = compute_statistics(splits["train"])
    splits = {
      name: dataclasses.replace(split, mean=mean, deviation=deviation)
      for name, split in splits.items()
    }
  longest = max(int(split.lengths().max()) for split in splits.values())
  max_len = min(max_len or longest, longest)
  for name, split in splits.items():
    require_numbers(split, name, max_len)
  return Task(
    name="time_series",
    protocol=protocol,
    splits=splits,
    max_len=max_len,
    channels=splits["train"].channels,
    num_classes=len(classes),
    classes=classes,
    trivial=RULES,
    info={**info, "problem": problem, "remarks": remarks},
  )


def _divide(
  splits: Mapping[str, Series], problem: str, seed: int
) -> dict[str, Series]:
  """Returns all series without copies, in three random parts.

  Raises:
    UserError: for series of unequal lengths, and for too few.
  """
  train, test = splits["train"], splits["test"]
  lengths = {*train.lengths().tolist(), *test.lengths().tolist()}
  if len(lengths) > 1:
    raise UserError(
      f"protocol='linoss' has no series of unequal lengths, but {problem} has "
      f"{min(lengths)} to {max(lengths)} steps: use protocol='jaxformers'."
    )
  merged = dataclasses.replace(
    train,
    values=np.concatenate([train.values, test.values]),
    starts=np.concatenate([train.starts, test.starts + len(train.values)]),
    stops=np.concatenate([train.stops, test.stops + len(train.values)]),
    labels=np.concatenate([train.labels, test.labels]),
    keys=np.concatenate([train.keys, test.keys]),
  )
  # Keep the first of equal series: keys are hashes of the numbers.
  _, first = np.unique(merged.keys, return_index=True)
  order = first[np.random.default_rng(seed).permutation(len(first))]
  if len(order) < MIN_SERIES:
    raise UserError(
      f"{problem} has {len(order)} different series: protocol='linoss' needs "
      f"at least {MIN_SERIES} for its three parts."
    )
  ends = [int(0.7 * len(order)), int(0.85 * len(order))]
  parts = np.split(order, ends)
  names = ("train", "validation", "test")
  return {
    name: merged.select(part) for name, part in zip(names, parts, strict=True)
  }
