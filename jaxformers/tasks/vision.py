"""Images in colour and their classes, for models of patches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers import paths
from jaxformers.data.engine import digests, encodings, preparation
from jaxformers.data.engine.source import Source
from jaxformers.data.images import stores
from jaxformers.data.images.augment import Augment
from jaxformers.data.images.splits import Images
from jaxformers.data.sets import cifar10, cifar100
from jaxformers.errors import UserError
from jaxformers.registry import call, choose
from jaxformers.tasks.splits import hold_out, slices
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  majority_class,
  pixel_regression,
)

# Counts of ILSVRC 2012's authors.
IMAGENET_COUNTS = {"train": 1_281_167, "validation": 50_000, "classes": 1_000}
# Of the pixels of the 50,000 training images.
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


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


def _cifar(
  name: str,
  origin: Source,
  normal: tuple[tuple[float, ...], tuple[float, ...]],
  data_dir: str,
  archive: str,
  augment: Mapping[str, Any] | None,
) -> Task:
  packed, info = preparation.open_splits(
    origin,
    encodings.pixels(),
    data_dir=data_folder(data_dir),
    archive=archive,
  )
  images = {
    split: Images(own, (32, 32, 3), mean=normal[0], deviation=normal[1])
    for split, own in packed.items()
  }
  images |= slices(images["train"], {"train": 90, "validation": 10})
  classes = origin.features["label"]
  return Task(
    name=name,
    protocol="jaxformers",
    splits=augmented(images, augment),
    selection="validation",
    vocabulary=(),
    max_len=0,
    num_classes=len(classes),
    trivial={
      "majority class": majority_class,
      "linear on pixels": pixel_regression,
    },
    info=info,
    image=(32, 32, 3),
    classes=tuple(classes),
  )


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
  return _cifar("cifar10", cifar10.SOURCE, CIFAR10, data_dir, archive, augment)


@TASKS.register("cifar100")
def load_cifar100(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  augment: Mapping[str, Any] | None = None,
) -> Task:
  """Opens CIFAR-100, a hundred fine classes; as `load_cifar10`.

  Args:
    data_dir: see `data_folder`.
    protocol: "jaxformers".
    archive: path of cifar-100-binary.tar.gz or its folder; "" looks for it,
      then downloads.
    augment: what is done to training images; see `data.augment.Augment`.
  """
  choose("protocol of cifar100", protocol, ("jaxformers",))
  return _cifar(
    "cifar100", cifar100.SOURCE, CIFAR100, data_dir, archive, augment
  )


@TASKS.register("imagenet2012")
def load_imagenet(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  size: int = 224,
  augment: Mapping[str, Any] | None = None,
) -> Task:
  """Opens ImageNet-1k (or any set of images) where it lies; nothing is copied.

  Args:
    data_dir: see `data_folder`; labels are kept there.
    protocol: "jaxformers": of the training images one in 128 (10,009) is
      validation, and the authors' validation is test; or "paper": theirs is
      both, as where the best epoch on it is quoted.
    archive: path of a directory in which tensorflow-datasets has prepared
      `imagenet2012` with file_format="array_record", or of a folder with
      train/CLASS/*.JPEG and val/CLASS/*.JPEG.
    size: height and width of what a model reads.
    augment: what is done to training images; see `data.augment.Augment`.

  The counts of images and classes are compared with the authors' and kept in
  `info`; a set with others is marked as not theirs beside every score.
  """
  choose("protocol of imagenet2012", protocol, ("jaxformers", "paper"))
  if not archive:
    raise UserError(
      "imagenet2012 has to be fetched by its user, from image-net.org: pass "
      "the path of a directory that tensorflow-datasets has prepared, or of a "
      "folder with train/CLASS/ and val/CLASS/, with --archive (prepare) or "
      "--config.task.archive."
    )
  root = paths.expand(archive)
  opened, classes = _open(root, data_folder(data_dir))
  images = {
    name: Images(store, (size, size, 3), encoded=True)
    for name, store in opened.items()
  }
  if protocol == "paper":
    images["validation"] = images["test"]
  else:
    count = max(len(images["train"]) // 128, 1)
    images |= hold_out(images["train"], count)
  return Task(
    name="imagenet2012",
    protocol=protocol,
    splits=augmented(images, augment),
    selection="test" if protocol == "paper" else "validation",
    vocabulary=(),
    max_len=0,
    num_classes=len(classes),
    trivial={"majority class": majority_class},
    info=_provenance(root, opened, classes),
    image=(size, size, 3),
    classes=classes,
  )


def _provenance(
  root: Path, opened: Mapping[str, stores.ImageStore], classes: Sequence[str]
) -> dict[str, Any]:
  """Returns where images come from, and what of it was verified: counts alone.

  Nobody has published a checksum of the unpacked images. A set with other
  counts is marked as another archive than the authors' wherever it is scored.
  """
  counts = {
    "train": len(opened["train"]),
    "validation": len(opened["test"]),
    "classes": len(classes),
  }
  info = {
    "source": root.name,
    "counts": counts,
    "authors_counts": counts == IMAGENET_COUNTS,
  }
  if not info["authors_counts"]:
    digest = hashlib.sha256(repr(tuple(classes)).encode())
    for store in (opened["train"], opened["test"]):
      digest.update(store.labels.tobytes() + store.keys.tobytes())
    info["sha256"] = f"listing-{digest.hexdigest()}"
    info["authors_checksum"] = False
  return info


def _open(
  root: Path, data_dir: Path
) -> tuple[dict[str, stores.ImageStore], tuple[str, ...]]:
  """`train` and `test`, the authors' validation; and the classes."""
  if (root / "dataset_info.json").is_file():
    from jaxformers.data.engine import builder

    splits, classes = builder.open_images(root)
    known = {"train": "train", "test": "validation"}
    if not {*known.values()} <= splits.keys():
      raise UserError(
        f"{root} has the splits {sorted(splits)}, not train and validation."
      )
    digest = hashlib.blake2b(
      (root / "dataset_info.json").read_bytes(), digest_size=6
    ).hexdigest()
    cache = data_dir / "packed"
    files = sorted(root.glob("*.array_record*"))
    content = digests.of_parts(
      *(f"{path.name} {path.stat().st_size}" for path in files)
    )
    return {
      name: stores.prepared(
        splits[own],
        cache / f"labels-{digest}-{own}",
        content,
        origin=f"{root}, split {own!r}",
      )
      for name, own in known.items()
    }, classes
  folders = {"train": root / "train", "test": root / "val"}
  for path in folders.values():
    if not path.is_dir():
      raise UserError(
        f"There is no folder {path}: give one with train/CLASS/ and "
        "val/CLASS/, or a directory of tensorflow-datasets."
      )
  classes = stores.classes_of(folders["train"])
  return {
    name: stores.folder(path, classes) for name, path in folders.items()
  }, classes
