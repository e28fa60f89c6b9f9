"""Semantic segmentation: predict a class for every pixel of a scene."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np

from jaxformers.data.engine import encodings
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import data_folder, open_splits
from jaxformers.data.engine.source import Source
from jaxformers.data.images.scenes import Scenes
from jaxformers.data.sets import ade20k
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks.splits import with_validation
from jaxformers.tasks.task import TASKS, Task

HELD_OUT = 1_000

PROTOCOLS = ("jaxformers", "paper")


@TASKS.register("ade20k")
def load_ade20k(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  window: Annotated[int, Interval("[2, 2^20]")] = 512,
  num_train: PositiveCount = ade20k.COUNTS["train"],
  num_test: PositiveCount = ade20k.COUNTS["test"],
) -> Task:
  """Opens ADE20K's scenes from the folder that its authors ship.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": 1,000 scenes of train (or a tenth, if there are
      fewer than 10,000) are validation, and the authors' validation scenes are
      test. "paper": the authors' validation scenes are validation and test.
    archive: path of the folder ADEChallengeData2016, of a tar of it, or of a
      directory in which tensorflow-datasets has prepared `scene_parse150`.
    window: pixels per side of the windows for training and evaluation.
    num_train: number of scenes in training/, validation included; a number
      other than the authors' is for a part of the data set.
    num_test: number of scenes in validation/.
  """
  # Check the options.
  choose("protocol of ade20k", protocol, PROTOCOLS)
  if num_train < 2 or num_test < 1:
    raise UserError(
      f"num_train={num_train} and num_test={num_test}: choose at least two "
      "scenes to train on, of which one is held out, and one to test."
    )
  # Store the files of the scenes; `Scenes.batch` decodes them.
  origin = ade20k.source(num_train, num_test)
  encoding = encodings.files("image", "annotation")
  packed, info = open_splits(origin, encoding, data_dir, archive)
  _check_counts(packed, origin, data_folder(data_dir))
  splits = {
    name: Scenes(split, (window, window, 3), ade20k.NUM_CLASSES)
    for name, split in packed.items()
  }
  # Validate on a part of train, or on the authors' validation scenes.
  is_paper = protocol == "paper"
  tenth = max(len(splits["train"]) // 10, 1)
  splits = with_validation(splits, 0 if is_paper else min(HELD_OUT, tenth))
  # Augment the remaining training scenes.
  splits["train"] = dataclasses.replace(splits["train"], augmented=True)
  return Task(
    name="ade20k",
    protocol=protocol,
    splits=splits,
    selection="test" if is_paper else "validation",
    num_classes=ade20k.NUM_CLASSES,
    trivial={"most frequent class": most_frequent},
    info=info,
    objective="segmentation",
    image=(window, window, 3),
  )


def _check_counts(
  packed: Mapping[str, Packed], origin: Source, folder: Path
) -> None:
  """Raises UserError if prepared data have other counts than the source."""
  sizes = {name: len(split) for name, split in packed.items()}
  if sizes != origin.counts:
    raise UserError(
      f"The prepared {origin.key} holds {sizes} scenes instead of "
      f"{origin.counts}: delete {origin.key}* in tfds/ and packed/ of "
      f"{folder}, and prepare it again."
    )


def most_frequent(task: Task, scenes: int = 200) -> float:
  """Returns the mean IoU of predicting one class for every pixel.

  The class is the most frequent one of train. Pixels are counted in the middles
  of the first `scenes` scenes of each split.
  """

  def areas(name: str) -> np.ndarray:
    # Count the pixels of every class, [num_classes].
    split = task.splits[name]
    few = np.arange(min(scenes, len(split)))
    labels = split.batch(few)["targets"].ravel()
    return np.bincount(labels[labels >= 0], minlength=task.num_classes)

  # The IoU of the class is its share of the pixels; other classes have IoU 0.
  guess, labelled = areas("train").argmax(), areas("test")
  present = labelled > 0
  present[guess] = True
  iou = labelled[guess] / max(labelled.sum(), 1)
  return float(iou / present.sum())
