"""Splits of images in colour, as a model of patches reads them."""

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
from jaxformers.data.images import augment
from jaxformers.data.images.augment import Augment
from jaxformers.data.images.stores import ImageStore
from jaxformers.errors import UserError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

Key = tuple[int, int, int]


_NONE = Augment()


@functools.cache
def pool() -> concurrent.futures.ThreadPoolExecutor:
  """Threads that decode, as many as there are cores."""
  return concurrent.futures.ThreadPoolExecutor(os.cpu_count())


@dataclasses.dataclass(frozen=True)
class Pictures:
  """What splits of pictures share, whatever is said of them.

  Attributes:
    packed: the stored bytes; a `Packed` or a `ImageStore`.
    shape: (height, width, channels) of what a model reads.
    mean, deviation: of the channels, of values in [0, 1].
  """

  packed: Packed | ImageStore
  shape: tuple[int, int, int]
  mean: tuple[float, ...] = dataclasses.field(default=IMAGENET[0], kw_only=True)
  deviation: tuple[float, ...] = dataclasses.field(
    default=IMAGENET[1], kw_only=True
  )

  def __len__(self) -> int:
    return len(self.packed)

  @property
  def keys(self) -> np.ndarray:
    """uint64 [count]."""
    return self.packed.keys

  def lengths(self) -> np.ndarray:
    """Zeros [count]: what a model reads is of one size."""
    return np.zeros(len(self), np.int64)

  def digest(self) -> str:
    """Digest of what is stored; see `Packed.digest` and `ImageStore.digest`."""
    return self.packed.digest()

  def reading(self) -> dict[str, Any]:
    """How bytes become numbers, as plain JSON."""
    return {
      "shape": list(self.shape),
      "mean": list(self.mean),
      "deviation": list(self.deviation),
    }

  def select(self, indices: Any) -> Self:
    """The split of some pictures, in their order."""
    return dataclasses.replace(self, packed=self.packed.select(indices))

  def decoded(self, row: int, **options: Any) -> Image.Image:
    """Decodes the file that is stored in a row.

    Args:
      row: of `packed.raw`; a split of pairs of files has two rows an example.
      **options: of `pictures.decode`.

    Raises:
      UserError: for a file that cannot be read, with its place and the remedy.
    """
    refuse = functools.partial(_refusal, self.packed, row)
    return pictures.decode(self.packed.raw(row).tobytes(), refuse, **options)

  def normalised(self, pixels: np.ndarray) -> np.ndarray:
    """Pixels of 0 to 255 as a model reads them, float32."""
    mean, deviation = np.float32(self.mean), np.float32(self.deviation)
    return (pixels.astype(np.float32) / 255 - mean) / deviation


def _refusal(packed: Packed | ImageStore, row: int, reason: str) -> UserError:
  """Returns the error of a stored file that cannot be read."""
  if isinstance(packed, ImageStore):
    return packed.refusal(row, reason)
  filename = getattr(packed.tokens, "filename", None)
  if filename is None:
    return UserError(f"File {row} of a split in memory is {reason}.")
  folder = Path(filename).parent
  # A selection has other rows than the folder.
  offsets = np.load(folder / "offsets.npy")
  same = offsets[:-1] == packed.starts[row]
  same &= offsets[1:] == packed.stops[row]
  file = int(np.flatnonzero(same)[0])
  example, part = divmod(file, packed.num_inputs)
  return UserError(
    f"{folder}: file {part + 1} of {packed.num_inputs} of example {example} is "
    f"{reason}. Delete {folder.parent} and run again; if the message stays, "
    f"delete the data set's folder in {folder.parents[2] / 'tfds'} as well."
  )


@dataclasses.dataclass(frozen=True)
class Images(Pictures):
  """Images and their classes, decoded, augmented and normalised in batches.

  Image k is stored as uint8 pixels row by row with their channels last, or as a
  JPEG or PNG file.

  Attributes:
    encoded: whether files are stored, of any size.
    augment: what is done to training images.

  The others are those of `Pictures`.
  """

  encoded: bool = False
  augment: Augment = _NONE

  @property
  def labels(self) -> np.ndarray:
    """int32 [count]."""
    return self.packed.labels

  @property
  def repeats(self) -> int:
    """How often an image stands in a batch of training."""
    return self.augment.repeats

  def pixels(self, indices: np.ndarray) -> np.ndarray:
    """Images as in evaluation, uint8 [b, height, width, c]."""

    def one(k: int) -> np.ndarray:
      return np.asarray(augment.fit(self._open(k), self.shape[:2]))

    return np.stack(list(self._each(one, [int(k) for k in indices])))

  def batch(
    self, indices: np.ndarray, max_len: int = 0, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """The images of some indices, normalised.

    Args:
      indices: integers [b] within the split.
      max_len: of no meaning.
      key: (seed, step, number of the first row) for training images, which then
        are augmented, a function of it alone; None for evaluation.

    Returns:
      inputs float32 [b, height, width, c], targets int32 [b]; under mixup or
      cutmix what `augment.mix` returns.
    """
    del max_len
    targets = self.labels[indices]
    if key is None:
      inputs = self.normalised(self.pixels(indices))
      return {"inputs": inputs, "targets": targets}
    seed, step, first = key
    how = self.augment

    def one(row: int) -> np.ndarray:
      rng = np.random.default_rng([seed, 2, step, first + row])
      picture = self._open(int(indices[row]))
      picture = augment.image(picture, self.shape[:2], how, rng)
      pixels = self.normalised(np.asarray(picture))
      if how.erase and rng.random() < how.erase:
        augment.erase(pixels, rng)
      return pixels

    inputs = np.stack(list(self._each(one, range(len(indices)))))
    if how.mixup or how.cutmix:
      rng = np.random.default_rng([seed, 3, step])
      return augment.mix(inputs, targets, how, rng)
    return {"inputs": inputs, "targets": targets}

  def _open(self, k: int) -> Image.Image:
    if not self.encoded:
      stored = self.packed.raw(k)
      return Image.fromarray(np.asarray(stored).reshape(self.shape))
    return self.decoded(k)

  def _each(
    self, make: Callable[[int], np.ndarray], rows: Iterable[int]
  ) -> Iterable[np.ndarray]:
    # Threads, where decoding is most of the work and holds no lock.
    return pool().map(make, rows) if self.encoded else map(make, rows)
