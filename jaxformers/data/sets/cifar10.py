"""CIFAR-10 (Krizhevsky 2009): 60,000 images of 32 x 32 pixels in colour."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import pictures
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.foundations.errors import UserError

_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
LABELS = tuple(_NAMES.split())
PER_LABEL = {"train": 5_000, "test": 1_000}
MAX_BYTES = 1 << 29  # The authors' archives unpack to 0.19 GB.
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _images(
  archive: Path,
) -> Iterator[tuple[str, str | int, Mapping[str, Any]]]:
  """Yields (split, key, example) from binary batches or folders of pictures.

  For the authors' archives, the keys are equal to the stock builder's. So the
  first nine tenths of the sorted examples are LRA's training split.
  """
  seen = dict.fromkeys(PER_LABEL, 0)
  for (split, place), name, content in archives.placed_members(
    archive, _place, max_bytes=MAX_BYTES
  ):
    # Read a binary batch of many images, or a picture file of one image.
    images: Iterable[tuple[np.ndarray, str]]
    if isinstance(place, int):
      if not name.endswith(".bin"):
        raise pickle_error(archive, name, SOURCE)
      images, start = read_batch(archive, name, content, LABELS), place
    else:
      refuse = functools.partial(archives.refusal, archive, name)
      picture = pictures.decode(content, refuse, size=(32, 32))
      images, start = [(np.asarray(picture), place)], seen[split]
      seen[split] += 1
    # Yield each image; its key is its number, or the name of its file.
    for k, (image, label) in enumerate(images, start):
      example = {"id": f"{split}_{k:05d}", "image": image, "label": label}
      yield split, k if isinstance(place, int) else name, example


def _place(name: str) -> tuple[str, int | str] | None:
  """Returns the split of a file and its place or label; None for other files.

  For a batch, the second value is the number of its first image. For a picture
  it is the label, which is the name of the folder.
  """
  # Match the batches data_batch_1 to data_batch_5 and test_batch.
  parts = name.split("/")
  stem = parts[-1].removesuffix(".bin")
  if stem in BATCHES:
    number = BATCHES.index(stem)
    return ("train", 10_000 * number) if number < 5 else ("test", 0)
  # Match pictures such as train/CLASS/NAME.png.
  is_picture = parts[-1].endswith((".png", ".jpg", ".jpeg"))
  if not is_picture or len(parts) < 3 or parts[-3] not in PER_LABEL:
    return None
  return parts[-3], parts[-2]


def read_batch(
  archive: Path,
  name: str,
  content: bytes,
  labels: Sequence[str],
  label_bytes: int = 1,
) -> Iterator[tuple[np.ndarray, str]]:
  """Yields the images, uint8 [32, 32, 3], and labels of a binary CIFAR batch.

  Args:
    archive: path of the archive, for messages.
    name: name of the batch.
    content: rows of the labels of an image, one byte each, and its planes of
      red, green and blue.
    labels: names of the classes; the last label of an image is their index.
    label_bytes: number of labels of an image.
  """
  # Check the size of the batch, and the range of its labels.
  size = label_bytes + 3 * 32 * 32
  if not content or len(content) % size:
    raise archives.refusal(archive, name, f"{len(content):,} bytes long")
  rows = np.frombuffer(content, np.uint8).reshape(-1, size)
  classes = rows[:, label_bytes - 1]
  if classes.max() >= len(labels):
    problem = f"a batch with labels beyond {len(labels) - 1}"
    raise archives.refusal(archive, name, problem)
  # Move the channels to the end: [count, 32, 32, 3].
  images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
  for image, number in zip(images, classes, strict=True):
    yield image, labels[number]


def pickle_error(archive: Path, name: str, source: Source) -> UserError:
  """Returns the error for a pickled batch of the authors' Python archive."""
  return UserError(
    f"{archive} holds {name!r}, a pickle, which could run any code when it is "
    f"read: fetch {source.archives[0]} from {source.url} and pass "
    f"{source.archive_options}."
  )


def read(archive: Path) -> dict[str, list[Keyed]]:
  """Reads both splits: `id`, `image`, uint8 [32, 32, 3], and `label`.

  Args:
    archive: path of the authors' binary archive, or of folders
      {train,test}/CLASS/*.{png,jpg}, packed or unpacked.

  Raises:
    UserError: for an archive that is truncated or has unexpected counts, and
      for the authors' Python archive, which consists of pickles.
  """
  return collect(_images(archive), archive, PER_LABEL, LABELS)


SOURCE = Source(
  name="cifar10",
  features={"id": bytes, "image": (32, 32, 3), "label": LABELS},
  read=read,
  archives=(
    "cifar-10-binary.tar.gz",
    "cifar-10-batches-bin",
    "cifar10_jpeg.tar.xz",
  ),
  url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
  sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
  size=170_052_171,
  counts={"train": 50_000, "test": 10_000},
  homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
)
