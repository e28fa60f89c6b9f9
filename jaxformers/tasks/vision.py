"""Images in colour and their classes, for models of patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformers.data import cifar10, encodings, source
from jaxformers.data.augment import Augment
from jaxformers.data.images import Images
from jaxformers.registry import call, choose
from jaxformers.tasks.splits import slices
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  majority_class,
  pixel_regression,
)

# Of the pixels of the 50,000 training images.
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def augmented(
  splits: Mapping[str, Images], how: Mapping[str, Any] | None
) -> dict[str, Images]:
  """The splits, of which `train` is augmented.

  Args:
    splits: `train` among them.
    how: fields of `Augment`; an unknown one lists them.
  """
  chosen = call("task.augment", Augment, dict(how or {}))
  train = dataclasses.replace(splits["train"], augment=chosen)
  return {**splits, "train": train}


@TASKS.register("cifar10")
def load_cifar10(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  augment: Mapping[str, Any] | None = None,
) -> Task:
  """Opens CIFAR-10 in colour; the first time from an archive or the network.

  Of the training images the last tenth are validation, as in `image`.

  Args:
    data_dir: see `data_folder`.
    protocol: "jaxformers".
    archive: see the task `image`.
    augment: what is done to training images; see `data.augment.Augment`.
  """
  choose("protocol of cifar10", protocol, ("jaxformers",))
  packed, info = source.pack(
    cifar10.SOURCE,
    encodings.pixels(),
    data_dir=data_folder(data_dir),
    archive=archive,
  )
  images = {
    name: Images(split, (32, 32, 3), False, *CIFAR10)
    for name, split in packed.items()
  }
  images |= slices(images["train"], {"train": 90, "validation": 10})
  return Task(
    name="cifar10",
    protocol=protocol,
    splits=augmented(images, augment),
    selection="validation",
    vocabulary=(),
    max_len=0,
    num_classes=10,
    trivial={
      "majority class": majority_class,
      "linear on pixels": pixel_regression,
    },
    info=info,
    objective="classification",
    image=(32, 32, 3),
  )
