"""Reads encoded images in place: from folders by class, or prepared by tfds.

Stores are for data sets that are too large to be copied. A store has the same
interface as a `Packed` split of files: `raw(k)`, `labels`, `keys`, `select`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from jaxformers.data.engine import digests, files, packed
from jaxformers.data.engine.source import Examples
from jaxformers.foundations.errors import UserError

ENDINGS = (".jpeg", ".jpg", ".png")


@dataclasses.dataclass(frozen=True)
class ImageStore:
  """Images as JPEG or PNG files, read one at a time.

  Attributes:
    labels: classes, int32 [count].
    keys: identifiers of the images, uint64 [count]: hashes of names, or
      numbers.
    places: paths of the images, or their numbers in the set, [count].
    read: function from a place to the bytes of its image.
    refuse: function from a place, and the reason why its image cannot be read,
      to an error message with the remedy.
    content: text that identifies these images, for the digest.
  """

  labels: np.ndarray
  keys: np.ndarray
  places: np.ndarray
  read: Callable[[Any], bytes]
  refuse: Callable[[Any, str], str]
  content: str = ""

  def __len__(self) -> int:
    return len(self.labels)

  def raw(self, k: int) -> np.ndarray:
    """Returns the bytes of image k, uint8."""
    return np.frombuffer(self.read(self.places[k]), np.uint8)

  def refusal(self, k: int, reason: str) -> UserError:
    """Returns the error for an image that cannot be read, with the remedy."""
    return UserError(self.refuse(self.places[k], reason))

  def select(self, indices: Any) -> ImageStore:
    """Returns the store of the images at `indices`, in this order."""
    names = ("labels", "keys", "places")
    arrays = {name: getattr(self, name)[indices] for name in names}
    return dataclasses.replace(self, **arrays)

  def digest(self) -> str:
    """Returns the digest of all labels, keys and `content`.

    The digest does not cover the pixels, because there may be millions of
    files: an image that changes in place is not detected. The keys of a folder
    of images are hashes of file names, so other names, or another number of
    files, are detected.
    """
    return digests.of_parts(self.content, self.labels, self.keys)


def _hash(name: str) -> int:
  digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
  return int.from_bytes(digest, "big")


def list_classes(root: Path) -> tuple[str, ...]:
  """Returns the sorted names of the folders in a folder, one for each class.

  Skips folders that systems add, such as .ipynb_checkpoints.
  """
  folders = (path.name for path in root.iterdir() if path.is_dir())
  return tuple(sorted(name for name in folders if not files.is_junk(name)))


def open_folder(root: Path, classes: Sequence[str]) -> ImageStore:
  """Lists the images of root/CLASS/**, labelled by CLASS.

  Follows links to folders, and skips files that systems add; see `files.walk`.

  Args:
    root: folder that holds the folders of the classes.
    classes: names of the classes; a label is an index of this sequence.

  Raises:
    UserError: for a folder that is not a class, a link to a missing image, a
      link to a folder that holds the link, or if there are no images.
  """
  # List all files by class, in the order of their names.
  numbers = {name: number for number, name in enumerate(classes)}
  names, labels = [], []
  for name in list_classes(root):
    if name not in numbers:
      raise UserError(
        f"{root} has a folder {name!r}, which is none of the classes "
        f"{classes[0]!r} to {classes[-1]!r}: give the folder that holds the "
        "classes' folders and no others."
      )
    for file, entry in files.walk(root / name):
      if file.lower().endswith(ENDINGS):
        if not entry.is_file():
          raise UserError(
            f"{entry.path} is no file, or a link to a missing one: remove or "
            "replace it."
          )
        names.append(f"{name}/{file}")
        labels.append(numbers[name])
  if not names:
    raise UserError(
      f"{root} holds no {'/'.join(ENDINGS)} files in folders: give a folder "
      "with one folder of images for each class."
    )
  # Identify an image by its name, because its content is not read.
  keys = np.array([_hash(name) for name in names], np.uint64)

  def refuse(name: str, reason: str) -> str:
    return (
      f"{root / name} is {reason}. Download the file again, or remove it from "
      "the folder."
    )

  return ImageStore(
    np.array(labels, np.int32),
    keys,
    np.array(names),
    # Do not use np.fromfile: it returns a part of the file if the disk fails.
    read=lambda name: (root / name).read_bytes(),
    refuse=refuse,
  )


def open_prepared(
  examples: Examples, cache: Path, content: str = "", *, origin: str = ""
) -> ImageStore:
  """Returns the images of a data source; caches their labels in a file.

  Args:
    examples: data source of tensorflow-datasets, with the features `image`, not
      decoded, and `label`.
    cache: folder to create for the labels and their digest.
    content: text for the digest; see `ImageStore`.
    origin: folder and split of the data source, for messages.

  Raises:
    UserError: for damaged labels; the message names the folder to remove.
  """

  def make(staged: Path) -> None:
    # Read every example once, a thousand at a time.
    labels = np.zeros(len(examples), np.int32)
    bar = tqdm.trange(0, len(labels), 1_000, desc="labels", disable=None)
    for start in bar:
      rows = range(start, min(start + 1_000, len(labels)))
      chunk = examples.__getitems__(rows)
      labels[start : start + 1_000] = [example["label"] for example in chunk]
    packed.save(staged / "labels.npy", labels)
    digests.seal(staged, packed.RECORD, {})

  # Open the labels; the key of an image is its number.
  packed.stage(cache, make)
  digests.verify(cache, packed.RECORD)
  labels = np.load(cache / "labels.npy")
  places = np.arange(len(labels))
  keys = places.astype(np.uint64)

  def refuse(place: int, reason: str) -> str:
    return (
      f"The image of example {place} of {origin or 'a set'} is {reason}. "
      "Prepare the set again with tensorflow-datasets."
    )

  return ImageStore(
    labels,
    keys,
    places,
    read=lambda place: examples[int(place)]["image"],
    refuse=refuse,
    content=content,
  )
