"""Encoded images where they lie: in folders by class, or prepared by tfds.

For data sets that are too large to be kept twice. A store is read like a
`Packed` of files: `raw(k)`, `labels`, `keys`, `select`.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from jaxformers.data.engine import digests, packed
from jaxformers.errors import UserError

ENDINGS = (".jpeg", ".jpg", ".png")


@dataclasses.dataclass(frozen=True)
class ImageStore(abc.ABC):
  """Some images, each a JPEG or PNG file.

  Attributes:
    labels: int32 [count].
    keys: uint64 [count], hashes of names, or numbers.
    content: what else tells these images from others, "" for nothing.
  """

  labels: np.ndarray
  keys: np.ndarray
  content: str = dataclasses.field(default="", kw_only=True)

  def __len__(self) -> int:
    return len(self.labels)

  @abc.abstractmethod
  def raw(self, k: int) -> np.ndarray:
    """The bytes of image k, uint8."""

  @abc.abstractmethod
  def refusal(self, k: int, reason: str) -> UserError:
    """Returns the error of an image that cannot be read: place and remedy."""

  def __getitem__(self, k: int) -> np.ndarray:
    return self.raw(k)

  def digest(self) -> str:
    """Digest of all labels and keys, and of `content`.

    The images themselves are not read, for they may be millions of files: one
    that is changed in place is not noticed. A key in a `Folder` is a hash of
    the file's name, so other names or another number of files are.
    """
    return digests.of_parts(self.content, self.labels, self.keys)


@dataclasses.dataclass(frozen=True)
class Folder(ImageStore):
  """Images in folders that are called as their class.

  Attributes:
    root: above the folders.
    names: of the files, seen from there, [count].
  """

  root: Path
  names: np.ndarray

  def raw(self, k: int) -> np.ndarray:
    """The bytes of image k, uint8."""
    # Not np.fromfile, which returns less than the file when a disk fails.
    return np.frombuffer(self._path(k).read_bytes(), np.uint8)

  def refusal(self, k: int, reason: str) -> UserError:
    """Returns the error of an image that cannot be read, with its path."""
    return UserError(
      f"{self._path(k)} is {reason}. Fetch the file again, or take it out of "
      "the folder."
    )

  def _path(self, k: int) -> Path:
    return self.root / str(self.names[k])

  def select(self, indices: Any) -> Folder:
    """Some images, in their order."""
    return dataclasses.replace(
      self,
      labels=self.labels[indices],
      keys=self.keys[indices],
      names=self.names[indices],
    )


@dataclasses.dataclass(frozen=True)
class Prepared(ImageStore):
  """Images that tensorflow-datasets has prepared in array_record.

  Attributes:
    examples: a data source of `image`, not decoded, and `label`.
    places: of the images in it, [count].
    origin: folder and split of the data source, for messages.
  """

  examples: Sequence[Any]
  places: np.ndarray
  origin: str = dataclasses.field(default="", kw_only=True)

  def raw(self, k: int) -> np.ndarray:
    """The bytes of image k, uint8."""
    image = self.examples[int(self.places[k])]["image"]
    return np.frombuffer(image, np.uint8)

  def refusal(self, k: int, reason: str) -> UserError:
    """Returns the error of an image that cannot be read, with its number."""
    return UserError(
      f"The image of example {int(self.places[k])} of {self.origin or 'a set'} "
      f"is {reason}. Prepare the set again with tensorflow-datasets."
    )

  def select(self, indices: Any) -> Prepared:
    """Some images, in their order."""
    return dataclasses.replace(
      self,
      labels=self.labels[indices],
      keys=self.keys[indices],
      places=self.places[indices],
    )


def _hash(name: str) -> int:
  digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big")


def classes_of(root: Path) -> tuple[str, ...]:
  """The names of the folders in a folder, in order."""
  return tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))


def folder(root: Path, classes: Sequence[str]) -> Folder:
  """The images of root/CLASS/**, labelled by the place of CLASS in `classes`.

  Raises:
    UserError: for a folder of no known class, or without images.
  """
  numbers = {name: number for number, name in enumerate(classes)}
  names, labels = [], []
  for name in classes_of(root):
    if name not in numbers:
      raise UserError(
        f"{root} has a folder {name!r}, which is no class of "
        f"{classes[0]!r} to {classes[-1]!r}: give the folder right above the "
        "classes."
      )
    for path in sorted((root / name).rglob("*")):
      if path.suffix.lower() in ENDINGS:
        names.append(path.relative_to(root).as_posix())
        labels.append(numbers[name])
  if not names:
    raise UserError(
      f"{root} holds no {'/'.join(ENDINGS)} files in folders that are called "
      "as their class."
    )
  keys = np.array([_hash(name) for name in names], np.uint64)
  return Folder(np.array(labels, np.int32), keys, root, np.array(names))


def prepared(
  examples: Sequence[Any], cache: Path, content: str = "", *, origin: str = ""
) -> Prepared:
  """The images of a data source; their labels are read once, to a file.

  Args:
    examples: see `Prepared`.
    cache: a folder that is made for the labels, with their digest.
    content: see `ImageStore`.
    origin: folder and split of the data source, for messages.

  Raises:
    UserError: for damaged labels, naming the folder to remove.
  """

  def make(staged: Path) -> None:
    labels = np.zeros(len(examples), np.int32)
    bar = tqdm.trange(0, len(labels), 1_000, desc="labels", disable=None)
    for start in bar:
      rows = range(start, min(start + 1_000, len(labels)))
      found = examples.__getitems__(rows)
      labels[start : start + 1_000] = [one["label"] for one in found]
    packed.save(staged / "labels.npy", labels)
    digests.seal(staged, packed.RECORD, {})

  def is_older(folder: Path) -> bool:
    return not (folder / packed.RECORD).exists()

  packed.stage(cache, make, is_older)
  digests.verify(cache, packed.RECORD)
  labels = np.load(cache / "labels.npy")
  places = np.arange(len(labels))
  keys = places.astype(np.uint64)
  return Prepared(
    labels, keys, examples, places, content=content, origin=origin
  )
