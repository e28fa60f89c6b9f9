"""CIFAR-10 (Krizhevsky 2009): 60,000 images of 32 x 32 pixels in colour."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from jaxformers.data import archive as archives
from jaxformers.data.source import Keyed, Source, collect

LABELS = (
  "airplane",
  "automobile",
  "bird",
  "cat",
  "deer",
  "dog",
  "frog",
  "horse",
  "ship",
  "truck",
)
PER_LABEL = {"train": 5_000, "test": 1_000}
MAX_BYTES = 1 << 29  # The authors' archives unpack to 0.19 GB.
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _images(
  archive: Path,
) -> Iterator[tuple[str, str | int, Mapping[str, Any]]]:
  """Yields (split, key, example) from any of the layouts that there are.

  Keys are the stock builder's for the authors' archives, so that the order is
  the one in which the first nine tenths are LRA's training split.
  """
  seen = dict.fromkeys(PER_LABEL, 0)
  for name, content in archives.members(
    archive, max_bytes=MAX_BYTES, wanted=_is_wanted
  ):
    parts = name.split("/")
    stem = parts[-1].removesuffix(".bin")
    if stem not in BATCHES:
      split, label = parts[-3:-1]
      image = _decode(archive, name, content)
      yield split, name, _example(split, seen[split], image, label)
      seen[split] += 1
      continue
    read = _read_binary if parts[-1].endswith(".bin") else _read_pickle
    images, labels = read(archive, name, content)
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
  picture = parts[-1].endswith((".png", ".jpg", ".jpeg"))
  return picture and len(parts) > 2 and parts[-3] in PER_LABEL


def planes(data: np.ndarray) -> np.ndarray:
  """[k, 3072], red, green and blue one after the other -> [k, 32, 32, 3]."""
  return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_binary(
  archive: Path, name: str, content: bytes
) -> tuple[np.ndarray, list[int]]:
  """One byte of label and 3072 of image, 10,000 times."""
  if len(content) != 10_000 * 3_073:
    raise _broken(archive, name, f"{len(content):,} bytes long")
  rows = np.frombuffer(content, np.uint8).reshape(-1, 3_073)
  return planes(rows[:, 1:]), _checked(archive, name, rows[:, 0].tolist())


class _Inert:
  """Stands for an array or its type while a pickle is read: it holds state.

  Nothing of NumPy is called: `numpy.ndarray` itself would take any bytes for
  pointers if it were asked to.
  """

  def __init__(self, *args: Any) -> None:
    self.args, self.state = args, ()

  def __setstate__(self, state: Any) -> None:
    self.state = state


def _reconstruct(*args: Any) -> _Inert:
  return _Inert(*args)


def _encode(text: str, encoding: str) -> bytes:
  """Bytes, as old protocols write them."""
  return text.encode(encoding)


class _Plain(pickle.Unpickler):
  """Reads dictionaries, lists, strings, numbers, and arrays as `_Inert`.

  A pickle can run any function when it is read; this one finds these alone.
  """

  def find_class(self, module: str, name: str) -> Any:
    """What the authors' pickles ask for, without its powers."""
    if module.split(".")[0] == "numpy":
      if name == "_reconstruct":
        return _reconstruct
      if name in ("ndarray", "dtype"):
        return _Inert
    if (module, name) == ("_codecs", "encode"):
      return _encode
    raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _bytes_of(array: Any) -> np.ndarray:
  """The uint8 [10000, 3072] of a pickled array that was read as `_Inert`."""
  _, shape, kind, fortran, content = array.state
  if shape != (10_000, 3_072) or kind.args[0] != "u1" or fortran:
    raise ValueError(f"an array of {shape}")
  return np.frombuffer(content, np.uint8).reshape(shape)


def _read_pickle(
  archive: Path, name: str, content: bytes
) -> tuple[np.ndarray, list[int]]:
  """A pickled dictionary with `data`, uint8 [10000, 3072], and `labels`."""
  try:
    batch = _Plain(io.BytesIO(content), encoding="bytes").load()
    images, labels = planes(_bytes_of(batch[b"data"])), batch[b"labels"]
    if type(labels) is not list or len(labels) != 10_000:
      raise ValueError("no list of 10,000 labels")
  except (pickle.UnpicklingError, *_MALFORMED) as error:
    raise _broken(archive, name, f"no batch of images ({error})") from None
  return images, _checked(archive, name, labels)


_MALFORMED = (
  KeyError,
  ValueError,
  TypeError,
  EOFError,
  AttributeError,
  IndexError,
)


def _decode(archive: Path, name: str, content: bytes) -> np.ndarray:
  """A picture as uint8 [32, 32, 3]; its size is read before its pixels."""
  try:
    with Image.open(io.BytesIO(content)) as image:
      if image.size != (32, 32):
        raise _broken(archive, name, "of {} x {} pixels".format(*image.size))
      return np.asarray(image.convert("RGB"))
  except (
    UnidentifiedImageError,
    OSError,
    Image.DecompressionBombError,
  ) as error:
    raise _broken(archive, name, f"no picture ({error})") from None


def _checked(archive: Path, name: str, labels: list[int]) -> list[int]:
  if not all(label in range(10) for label in labels):
    raise _broken(archive, name, "with labels beyond 9")
  return labels


def _broken(archive: Path, name: str, what: str) -> ValueError:
  return ValueError(
    f"{archive} holds {name!r}, which is {what}: it is not CIFAR-10. Fetch it "
    "again; nothing was kept of it."
  )


def read(archive: Path | None) -> dict[str, list[Keyed]]:
  """The images of both splits: `id`, `image`, uint8 [32, 32, 3], and `label`.

  Reads the authors' binary and pickled archives, and folders
  {train,test}/CLASS/*.{png,jpg} as an archive or unpacked.

  Raises:
    ValueError: for an archive that is cut short or holds other counts.
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
    "cifar-10-python.tar.gz",
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar10_jpeg.tar.xz",
  ),
  url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
  sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
  size=170_052_171,
  also=("6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",),
  counts={"train": 50_000, "test": 10_000},
  homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
)
