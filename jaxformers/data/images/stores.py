"""Encoded images read in place: in folders by class, or prepared by tfds.

For data sets that are too large to be stored twice. A store has the interface
of a `Packed` of files: `raw(k)`, `labels`, `keys`, `select`.
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
    labels: int32 [count].
    keys: uint64 [count], hashes of names, or numbers.
    places: paths or numbers of the images in the set, [count].
    read: function from a place to the bytes of its image.
    refuse: function from a place, and the reason why its image cannot be read,
      to a message with the remedy.
    content: text that tells these images from others, for the digest.
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
    """Returns the error of an image that cannot be read, with the remedy."""
    return UserError(self.refuse(self.places[k], reason))

  def select(self, indices: Any) -> ImageStore:
    """Returns a store of some images, in their order."""
    names = ("labels", "keys", "places")
    arrays = {name: getattr(self, name)[indices] for name in names}
    return dataclasses.replace(self, **arrays)

  def digest(self) -> str:
    """Returns the digest of all labels, keys and `content`.

    The images themselves are not read, because they may be millions of files:
    an image that changes in place is not noticed. Keys of a folder of images
    are hashes of file names, so other names or another number of files are.
    """
    return digests.of_parts(self.content, self.labels, self.keys)


def _hash(name: str) -> int:
  digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
  return int.from_bytes(digest, "big")


def list_classes(root: Path) -> tuple[str, ...]:
  """Returns the names of the folders in a folder, in order.

  Folders that systems add, such as .ipynb_checkpoints, are no classes.
  """
  folders = (path.name for path in root.iterdir() if path.is_dir())
  return tuple(sorted(name for name in folders if not files.is_junk(name)))


def open_folder(root: Path, classes: Sequence[str]) -> ImageStore:
  """Lists the images of root/CLASS/**, labelled by CLASS.

  Links to folders are entered; files that systems add are passed over: see
  `files.walk`.

  Args:
    root: folder of the classes' folders.
    classes: names of the classes; a label is a place in it.

  Raises:
    UserError: for a folder that is not a class, a link to a missing image or
      to a folder that holds it, or if there are no images.
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
  # Identify an image by its name: its content is not read.
  keys = np.array([_hash(name) for name in names], np.uint64)

  def refuse(name: str, reason: str) -> str:
    return (
      f"{root / name} is {reason}. Fetch the file again, or remove it from the "
      "folder."
    )

  return ImageStore(
    np.array(labels, np.int32),
    keys,
    np.array(names),
    # Not np.fromfile, which returns less than the file when a disk fails.
    read=lambda name: (root / name).read_bytes(),
    refuse=refuse,
  )


def open_prepared(
  examples: Examples, cache: Path, content: str = "", *, origin: str = ""
) -> ImageStore:
  """Returns the images of a data source; caches their labels in a file.

  Args:
    examples: data source of tensorflow-datasets: `image`, not decoded, and
      `label`.
    cache: folder to make for the labels and their digest.
    content: text for the digest; see `ImageStore`.
    origin: folder and split of the data source, for messages.

  Raises:
    UserError: for damaged labels, naming the folder to remove.
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
