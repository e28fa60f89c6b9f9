"""Splits of colour images for models that read patches."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from jaxformers.data.engine import pictures
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.split import Key, Split
from jaxformers.data.images import augment
from jaxformers.data.images.augment import Augment
from jaxformers.data.images.stores import ImageStore
from jaxformers.foundations.errors import UserError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_NO_AUGMENT = Augment()


@functools.cache
def pool() -> concurrent.futures.ThreadPoolExecutor:
  """Returns the pool of threads that decode images, one thread per core."""
  return concurrent.futures.ThreadPoolExecutor(os.cpu_count())


@dataclasses.dataclass(frozen=True)
class Pictures(Split):
  """Base class of splits of images, with classes or with annotations.

  Attributes:
    packed: stored bytes of the images.
    shape: (height, width, channels) of the inputs of a model.
    mean, deviation: statistics of each channel, for pixels in [0, 1].
  """

  packed: Packed | ImageStore
  shape: tuple[int, int, int]
  _: dataclasses.KW_ONLY
  mean: tuple[float, ...] = IMAGENET[0]
  deviation: tuple[float, ...] = IMAGENET[1]

  def __len__(self) -> int:
    return len(self.packed)

  @property
  def keys(self) -> np.ndarray:
    """Numbers that identify the examples, uint64 [count]."""
    return self.packed.keys

  def lengths(self) -> np.ndarray:
    """Returns zeros, int64 [count]: images have no length."""
    return np.zeros(len(self), np.int64)

  def digest(self) -> str:
    """Returns the digest of the data; see `Packed` and `ImageStore`."""
    return self.packed.digest()

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn bytes into inputs, as plain JSON."""
    names = ("shape", "mean", "deviation")
    return {name: list(getattr(self, name)) for name in names}

  def scoring(self) -> dict[str, Any]:
    """Returns how `batch` crops images for scoring, as plain JSON."""
    return {"crop": "centre", "scales": [1.0], "flip": False}

  def select(self, indices: Any) -> Self:
    """Returns the split of the images at `indices`, in this order."""
    return dataclasses.replace(self, packed=self.packed.select(indices))

  def decoded(self, row: int, **options: Any) -> Image.Image:
    """Decodes the file that is stored in a row.

    Args:
      row: argument of `packed.raw`; a split of pairs has two rows per example.
      **options: keyword arguments of `pictures.decode`.

    Raises:
      UserError: for a file that cannot be read, with its place and the remedy.
    """
    refuse = functools.partial(_refusal, self.packed, row)
    return pictures.decode(self.packed.raw(row).tobytes(), refuse, **options)

  def normalised(self, pixels: np.ndarray) -> np.ndarray:
    """Returns (pixels / 255 - mean) / deviation, float32."""
    mean = np.array(self.mean, np.float32)
    deviation = np.array(self.deviation, np.float32)
    return (pixels.astype(np.float32) / 255 - mean) / deviation


def _refusal(packed: Packed | ImageStore, row: int, reason: str) -> UserError:
  """Returns the error for a stored file that cannot be read."""
  if isinstance(packed, ImageStore):
    return packed.refusal(row, reason)
  # Only a memory-mapped array has a file to report.
  filename = getattr(packed.tokens, "filename", None)
  if filename is None:
    return UserError(f"File {row} of a split in memory is {reason}.")
  # Find the row in the folder: a selection has other row numbers.
  folder = Path(filename).parent
  offsets = np.load(folder / "offsets.npy")
  bounds = np.stack([offsets[:-1], offsets[1:]], 1)
  is_same = bounds == (packed.starts[row], packed.stops[row])
  example, part = divmod(int(is_same.all(1).argmax()), packed.num_inputs)
  return UserError(
    f"{folder}: file {part + 1} of {packed.num_inputs} of example {example} is "
    f"{reason}. Delete {folder.parent} and run again; if the message stays, "
    f"delete the data set's folder in {folder.parents[2] / 'tfds'} as well."
  )


@dataclasses.dataclass(frozen=True)
class Images(Pictures):
  """Images and their classes, decoded, augmented and normalised in batches.

  Image k is stored as uint8 pixels, row by row with the channels last, or as a
  JPEG or PNG file.

  Attributes:
    encoded: True if the images are stored as JPEG or PNG files of any size.
    augment: settings of the augmentation of training images.

  `Pictures` describes the other attributes.
  """

  encoded: bool = False
  augment: Augment = _NO_AUGMENT

  @property
  def labels(self) -> np.ndarray:
    """Classes, int32 [count]."""
    return self.packed.labels

  @property
  def repeats(self) -> int:
    """Number of copies of an image in a training batch."""
    return self.augment.repeats

  def pixels(self, indices: np.ndarray) -> np.ndarray:
    """Returns the pixels for evaluation, uint8 [b, height, width, c]."""

    def middle(k: int) -> np.ndarray:
      return np.asarray(augment.fit(self._open(k), self.shape[:2]))

    return self._stack(middle, map(int, indices))

  def batch(
    self, indices: np.ndarray, max_len: int = 0, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Returns a batch of images, normalised.

    Args:
      indices: numbers of the images in the split, integers [b].
      max_len: ignored, because images have no length.
      key: (seed, step, number of the first row), the seed of the augmentation
        of training images; None for evaluation.

    Returns:
      inputs float32 [b, height, width, c] and targets int32 [b]; with mixup or
      cutmix the result of `augment.mix`.
    """
    del max_len
    # Without a key, return centre crops of the images.
    targets = self.labels[indices]
    if key is None:
      inputs = self.normalised(self.pixels(indices))
      return {"inputs": inputs, "targets": targets}
    # Augment every row with its own generator, then mix the whole batch.
    seed, step, first = key
    how = self.augment

    def augmented(row: int) -> np.ndarray:
      rng = np.random.default_rng([seed, 2, step, first + row])
      picture = self._open(int(indices[row]))
      picture = augment.image(picture, self.shape[:2], how, rng)
      pixels = self.normalised(np.asarray(picture))
      if how.erase and rng.random() < how.erase:
        augment.erase(pixels, rng)
      return pixels

    inputs = self._stack(augmented, range(len(indices)))
    if how.mixup or how.cutmix:
      rng = np.random.default_rng([seed, 3, step])
      return augment.mix(inputs, targets, how, rng)
    return {"inputs": inputs, "targets": targets}

  def _open(self, k: int) -> Image.Image:
    if self.encoded:
      return self.decoded(k)
    return Image.fromarray(np.asarray(self.packed.raw(k)).reshape(self.shape))

  def _stack(
    self, make: Callable[[int], np.ndarray], rows: Iterable[int]
  ) -> np.ndarray:
    # Decode files in threads: Pillow releases the interpreter's lock.
    each = pool().map if self.encoded else map
    return np.stack(list(each(make, rows)))
