"""CIFAR-10 (Krizhevsky 2009): 60,000 images of 32 x 32 pixels in colour."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import pictures
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.errors import UserError

_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
LABELS = tuple(_NAMES.split())
PER_LABEL = {"train": 5_000, "test": 1_000}
MAX_BYTES = 1 << 29  # The authors' archives unpack to 0.19 GB.
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _images(
  archive: Path,
) -> Iterator[tuple[str, str | int, Mapping[str, Any]]]:
  """Yields (split, key, example) from binary batches or folders of pictures.

  Keys are the stock builder's for the authors' archives, so that the order is
  the one in which the first nine tenths are LRA's training split.
  """
  seen = dict.fromkeys(PER_LABEL, 0)
  for name, content in archives.members(
    archive, max_bytes=MAX_BYTES, wanted=_is_wanted
  ):
    parts = name.split("/")
    if parts[-1] in BATCHES:
      raise pickle_error(archive, name, SOURCE)
    stem = parts[-1].removesuffix(".bin")
    # A picture, in the folder of its class.
    if stem not in BATCHES:
      split, label = parts[-3:-1]
      image = _decode(archive, name, content)
      yield split, name, _example(split, seen[split], image, label)
      seen[split] += 1
      continue
    # A batch of 10,000 images.
    images, labels = _read_binary(archive, name, content)
    batch = BATCHES.index(stem)
    split, start = ("train", batch * 10_000) if batch < 5 else ("test", 0)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
      yield split, start + i, _example(split, start + i, image, LABELS[label])


def _example(
  split: str, index: int, image: np.ndarray, label: str
) -> dict[str, Any]:
  return {"id": f"{split}_{index:05d}", "image": image, "label": label}


def _is_wanted(name: str) -> bool:
  parts = name.split("/")
  if parts[-1].removesuffix(".bin") in BATCHES:
    return True
  is_picture = parts[-1].endswith((".png", ".jpg", ".jpeg"))
  return is_picture and len(parts) > 2 and parts[-3] in PER_LABEL


def planes(data: np.ndarray) -> np.ndarray:
  """Turns planes of red, green and blue [k, 3072] into [k, 32, 32, 3]."""
  return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_binary(
  archive: Path, name: str, content: bytes
) -> tuple[np.ndarray, np.ndarray]:
  """Returns images and labels: one byte and 3,072 bytes, 10,000 times."""
  if len(content) != 10_000 * 3_073:
    raise archives.refusal(archive, name, f"{len(content):,} bytes long")
  # A row is the label and then the planes of the image.
  rows = np.frombuffer(content, np.uint8).reshape(-1, 3_073)
  if rows[:, 0].max() > 9:
    raise archives.refusal(archive, name, "a batch with labels beyond 9")
  return planes(rows[:, 1:]), rows[:, 0]


def _decode(archive: Path, name: str, content: bytes) -> np.ndarray:
  """Returns a JPEG or PNG file as uint8 [32, 32, 3]."""
  refuse = functools.partial(archives.refusal, archive, name)
  return np.asarray(pictures.decode(content, refuse, size=(32, 32)))


def pickle_error(archive: Path, name: str, source: Source) -> UserError:
  """Returns the error for a batch of the authors' archive for Python."""
  binary = source.archives[0]
  return UserError(
    f"{archive} holds {name!r}, a pickle, which could run any code when it is "
    f"read: fetch {binary} from {source.url} and pass --archive PATH/{binary} "
    f"(prepare) or --config.task.archive=PATH/{binary}."
  )


def read(archive: Path | None) -> dict[str, list[Keyed]]:
  """Reads both splits: `id`, `image`, uint8 [32, 32, 3], and `label`.

  Args:
    archive: path of the authors' binary archive, or of folders
      {train,test}/CLASS/*.{png,jpg}, packed or unpacked.

  Raises:
    UserError: for an archive that is truncated or holds other counts, and for
      the authors' archive for Python, which is made of pickles.
  """
  expected = {
    split: dict.fromkeys(LABELS, count) for split, count in PER_LABEL.items()
  }
  return collect(_images(archive), archive, expected)


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
