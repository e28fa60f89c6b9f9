"""Classification of colour images, for models that read patches."""

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
# Published counts of ILSVRC 2012.
IMAGENET_COUNTS = {"train": 1_281_167, "validation": 50_000, "classes": 1_000}
# Mean and deviation of each channel over the 50,000 training images.
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def augmented(
  splits: Mapping[str, Images], how: Mapping[str, Any] | None
) -> dict[str, Images]:
  """Returns the splits with augmentation of `train`.

  Args:
    splits: splits by name.
    how: fields of `Augment`; an unknown field raises an error that lists all
      fields.
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
    origin: source of the images.
    statistics: mean and deviation of each channel, for pixels in [0, 1].
    data_dir, archive, augment: arguments of the task.
  """
  # Open the pixels, and validate on the last tenth of train.
  packed, info = open_splits(origin, encodings.pixels(), data_dir, archive)
  packed |= slices(packed["train"], {"train": 90, "validation": 10})
  # Normalise the images by the statistics of train.
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
  """Opens CIFAR-10 in colour; downloads it on first use if necessary.

  The last tenth of the training images is validation, as in the task `image`.

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
  """Opens CIFAR-100 in colour with its hundred fine classes.

  The last tenth of the training images is validation.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    archive: path of cifar-100-binary.tar.gz or of its folder; "" searches for
      one of them, and else downloads the archive.
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
  """Opens ImageNet-1k (or any set of images) in place, without copies.

  Compares the counts of images and classes with the published counts, and keeps
  them in `info`. Scores on a set with other counts are marked.

  Args:
    data_dir: folder for the labels; see `data_folder`.
    protocol: "jaxformers": one in 128 of the training images (10,009) is
      validation, and the authors' validation images are test. "paper": the
      authors' validation images are validation and test, as in papers that
      report the best epoch.
    archive: path of a directory in which tensorflow-datasets has prepared
      `imagenet2012` with file_format="array_record", or of a folder with
      train/CLASS/*.JPEG and val/CLASS/*.JPEG.
    size: height and width of the images that a model reads.
    augment: augmentation of training images; see `images.augment.Augment`.
  """
  # Require a path: a download needs an account.
  choose("protocol of imagenet2012", protocol, PROTOCOLS["imagenet2012"])
  if not archive:
    raise UserError(
      "imagenet2012 cannot be downloaded: fetch it from image-net.org and pass "
      "the path of a directory that tensorflow-datasets has prepared, or of a "
      "folder with train/CLASS/ and val/CLASS/, with --archive (prepare) or "
      "--config.task.archive."
    )
  # Open the images in place; `Images.batch` decodes them.
  root = paths.expand(archive)
  opened, classes = _open(root, data_folder(data_dir))
  images = {
    name: Images(store, (size, size, 3), encoded=True)
    for name, store in opened.items()
  }
  # Validate on a part of train, or on the authors' validation images.
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
  """Opens a directory that tensorflow-datasets has prepared; see `_open`."""
  from jaxformers.data.engine import builder

  # Use the authors' validation images as test: their test split has no labels.
  splits, classes = builder.open_images(root)
  sources = {"train": "train", "test": "validation"}
  if not {*sources.values()} <= splits.keys():
    raise UserError(
      f"{root} has the splits {sorted(splits)}: give a directory with the "
      "splits train and validation."
    )
  # Cache the labels under a digest of the metadata of the directory.
  description = (root / "dataset_info.json").read_bytes()
  digest = hashlib.blake2b(description, digest_size=6).hexdigest()
  # Digest the names and sizes of the files instead of their content.
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
  """Returns the description of the origin of the images; checks their counts.

  No checksum of the unpacked images is published, so only the counts can be
  checked. A set with other counts is marked as differing from the authors'.
  """
  # Count images and classes.
  train, test = opened["train"], opened["test"]
  sizes = (len(train), len(test), len(classes))
  counts = dict(zip(IMAGENET_COUNTS, sizes, strict=True))
  is_authors = counts == IMAGENET_COUNTS
  info = {"source": root.name, "counts": counts, "authors_counts": is_authors}
  if not is_authors:
    # Identify another set by a digest of its classes, labels and keys.
    digest = hashlib.sha256(repr(tuple(classes)).encode())
    for store in (train, test):
      digest.update(store.labels.tobytes() + store.keys.tobytes())
    info["sha256"] = f"listing-{digest.hexdigest()}"
    info["authors_checksum"] = False
  return info


def _open(
  root: Path, data_dir: Path
) -> tuple[dict[str, stores.ImageStore], tuple[str, ...]]:
  """Returns `train`, `test` (the authors' validation), and the classes."""
  if (root / "dataset_info.json").is_file():
    return _open_prepared(root, data_dir / "packed")
  # Otherwise read folders by class; val/ holds the images of `test`.
  folders = {"train": root / "train", "test": root / "val"}
  for path in folders.values():
    if not path.is_dir():
      raise UserError(
        f"There is no folder {path}: give a folder with train/CLASS/ and "
        "val/CLASS/, or a directory of tensorflow-datasets."
      )
  classes = stores.list_classes(folders["train"])
  return {
    name: stores.open_folder(path, classes) for name, path in folders.items()
  }, classes
