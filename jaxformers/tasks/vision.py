"""Images in colour and their classes, for models of patches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jaxformers.data.engine import digests, encodings, files
from jaxformers.data.engine.preparation import data_folder, open_splits
from jaxformers.data.engine.source import Source
from jaxformers.data.images import stores
from jaxformers.data.images.augment import Augment
from jaxformers.data.images.splits import Images
from jaxformers.data.sets import cifar10, cifar100
from jaxformers.foundations import paths
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval
from jaxformers.foundations.registry import call, choose
from jaxformers.tasks import baselines
from jaxformers.tasks.splits import slices, with_validation
from jaxformers.tasks.task import TASKS, Task

PROTOCOLS = {
  "cifar10": ("jaxformers",),
  "cifar100": ("jaxformers",),
  "imagenet2012": ("jaxformers", "paper"),
}
# Counts by the authors of ILSVRC 2012.
IMAGENET_COUNTS = {"train": 1_281_167, "validation": 50_000, "classes": 1_000}
# Mean and deviation of the pixels of the 50,000 training images.
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def augmented(
  splits: Mapping[str, Images], how: Mapping[str, Any] | None
) -> dict[str, Images]:
  """Returns the splits with augmentation of `train`.

  Args:
    splits: splits by name.
    how: fields of `Augment`; an unknown one raises an error that lists them.
  """
  chosen = call("task.augment", Augment, dict(how or {}))
  train = dataclasses.replace(splits["train"], augment=chosen)
  return {**splits, "train": train}


def _cifar(
  name: str,
  origin: Source,
  statistics: tuple[tuple[float, ...], tuple[float, ...]],
  data_dir: str,
  archive: str,
  augment: Mapping[str, Any] | None,
) -> Task:
  """Returns the task of CIFAR-10 or CIFAR-100.

  Args:
    name: name of the task.
    origin: source of its images.
    statistics: mean and deviation of each channel, in [0, 1].
    data_dir, archive, augment: arguments of the task.
  """
  packed, info = open_splits(origin, encodings.pixels(), data_dir, archive)
  # Validate on the last tenth of train.
  packed |= slices(packed["train"], {"train": 90, "validation": 10})
  # Read stored pixels as images, normalised by the statistics of train.
  mean, deviation = statistics
  images = {
    name: Images(split, (32, 32, 3), mean=mean, deviation=deviation)
    for name, split in packed.items()
  }
  classes = origin.features["label"]
  return Task(
    name=name,
    protocol="jaxformers",
    splits=augmented(images, augment),
    num_classes=len(classes),
    trivial=baselines.PIXELS,
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

  The last tenth of the training images are validation, as in the task `image`.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    archive: path of the archive; see the task `image`.
    augment: augmentation of training images; see `images.augment.Augment`.
  """
  choose("protocol of cifar10", protocol, PROTOCOLS["cifar10"])
  return _cifar("cifar10", cifar10.SOURCE, CIFAR10, data_dir, archive, augment)


@TASKS.register("cifar100")
def load_cifar100(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  augment: Mapping[str, Any] | None = None,
) -> Task:
  """Opens CIFAR-100 in colour, a hundred fine classes, as `load_cifar10`.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    archive: path of cifar-100-binary.tar.gz or its folder; "" looks for it,
      then downloads.
    augment: augmentation of training images; see `images.augment.Augment`.
  """
  choose("protocol of cifar100", protocol, PROTOCOLS["cifar100"])
  source = cifar100.SOURCE
  return _cifar("cifar100", source, CIFAR100, data_dir, archive, augment)


@TASKS.register("imagenet2012")
def load_imagenet(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  size: Annotated[int, Interval("[1, 2^12]")] = 224,
  augment: Mapping[str, Any] | None = None,
) -> Task:
  """Opens ImageNet-1k (or any set of images) in place; no image is copied.

  The counts of images and classes are compared with the authors' and kept in
  `info`; a set with other counts is marked so next to every score.

  Args:
    data_dir: folder for the labels; see `data_folder`.
    protocol: "jaxformers": one in 128 of the training images (10,009) is
      validation, and the authors' validation is test; or "paper": theirs is
      both, as in papers that report the best epoch on it.
    archive: path of a directory in which tensorflow-datasets has prepared
      `imagenet2012` with file_format="array_record", or of a folder with
      train/CLASS/*.JPEG and val/CLASS/*.JPEG.
    size: height and width of the images that a model reads.
    augment: augmentation of training images; see `images.augment.Augment`.
  """
  # Nothing can be downloaded: the authors require an account.
  choose("protocol of imagenet2012", protocol, PROTOCOLS["imagenet2012"])
  if not archive:
    raise UserError(
      "imagenet2012 cannot be downloaded: fetch it from image-net.org and pass "
      "the path of a directory that tensorflow-datasets has prepared, or of a "
      "folder with train/CLASS/ and val/CLASS/, with --archive (prepare) or "
      "--config.task.archive."
    )
  # Open the images in place; their bytes are decoded in batches.
  root = paths.expand(archive)
  opened, classes = _open(root, data_folder(data_dir))
  images = {
    name: Images(store, (size, size, 3), encoded=True)
    for name, store in opened.items()
  }
  # Choose the checkpoint on a part of train, or on the authors' validation.
  is_paper = protocol == "paper"
  held_out = 0 if is_paper else max(len(images["train"]) // 128, 1)
  images = with_validation(images, held_out)
  return Task(
    name="imagenet2012",
    protocol=protocol,
    splits=augmented(images, augment),
    selection="test" if is_paper else "validation",
    num_classes=len(classes),
    trivial=baselines.MAJORITY,
    info=_provenance(root, opened, classes),
    image=(size, size, 3),
    classes=classes,
  )


def _open_prepared(
  root: Path, cache: Path
) -> tuple[dict[str, stores.ImageStore], tuple[str, ...]]:
  """Does `_open` for a directory that tensorflow-datasets has prepared."""
  from jaxformers.data.engine import builder

  # Take the authors' validation as test: the test split has no labels.
  splits, classes = builder.open_images(root)
  sources = {"train": "train", "test": "validation"}
  if not {*sources.values()} <= splits.keys():
    raise UserError(
      f"{root} has the splits {sorted(splits)}: give a directory with the "
      "splits train and validation."
    )
  # Labels are cached under a digest of the directory's description.
  description = (root / "dataset_info.json").read_bytes()
  digest = hashlib.blake2b(description, digest_size=6).hexdigest()
  # Names and sizes of the files stand for their content in the digest.
  records = sorted(
    path
    for path in root.glob("*.array_record*")
    if not files.is_junk(path.name)
  )
  content = digests.of_parts(
    *(f"{path.name} {path.stat().st_size}" for path in records)
  )
  return {
    name: stores.open_prepared(
      splits[split],
      cache / f"labels-{digest}-{split}",
      content,
      origin=f"{root}, split {split!r}",
    )
    for name, split in sources.items()
  }, classes


def _provenance(
  root: Path, opened: Mapping[str, stores.ImageStore], classes: Sequence[str]
) -> dict[str, Any]:
  """Returns where images come from; only their counts are verified.

  No checksum of the unpacked images is published. A set with other counts is
  marked as another archive than the authors' next to every score.
  """
  # Count images and classes.
  train, test = opened["train"], opened["test"]
  sizes = (len(train), len(test), len(classes))
  counts = dict(zip(IMAGENET_COUNTS, sizes, strict=True))
  is_authors = counts == IMAGENET_COUNTS
  info = {"source": root.name, "counts": counts, "authors_counts": is_authors}
  if not is_authors:
    # Tell such sets apart by their classes, labels and names.
    digest = hashlib.sha256(repr(tuple(classes)).encode())
    for store in (train, test):
      digest.update(store.labels.tobytes() + store.keys.tobytes())
    info["sha256"] = f"listing-{digest.hexdigest()}"
    info["authors_checksum"] = False
  return info


def _open(
  root: Path, data_dir: Path
) -> tuple[dict[str, stores.ImageStore], tuple[str, ...]]:
  """Opens `train` and `test`, the authors' validation; also the classes."""
  if (root / "dataset_info.json").is_file():
    return _open_prepared(root, data_dir / "packed")
  # Otherwise read folders by class; the authors call the test split val.
  folders = {"train": root / "train", "test": root / "val"}
  for path in folders.values():
    if not path.is_dir():
      raise UserError(
        f"There is no folder {path}: give one with train/CLASS/ and "
        "val/CLASS/, or a directory of tensorflow-datasets."
      )
  classes = stores.list_classes(folders["train"])
  return {
    name: stores.open_folder(path, classes) for name, path in folders.items()
  }, classes
