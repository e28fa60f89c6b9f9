"""Splits of scenes: images of any size, and a class for each pixel."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxformers.data.images.splits import Key, Pictures, pool

SCALES = (0.5, 2.0)  # Of training images, to the short side of a window.
MOST = 0.75  # Of a training window that one class may cover.
LONGEST = 4.0  # Times the short side.


@dataclasses.dataclass(frozen=True)
class Scenes(Pictures):
  """Images and annotations, pairs of files.

  Training windows are cut from images scaled by 0.5 to 2, so that if possible
  no class covers more than three quarters, and mirrored and changed in colour
  at random, as in mmsegmentation, which Segmenter takes it from. Evaluation by
  `batch` sees the middle of every image; by `scene` all of it.

  Attributes:
    num_classes: annotations are 1 to num_classes; 0 is not counted.
    augmented: whether `batch` with a key is random.

  The others are those of `Pictures`: `packed` is one of
  `encodings.files("image", "annotation")`, and `shape` that of a window.
  """

  num_classes: int
  augmented: bool = False

  def scene(self, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scene k: uint8 [h, w, 3], and int32 [h, w], -1 where not counted."""
    picture, annotation = self._open(k)
    return np.asarray(picture), self._labels(annotation)

  def batch(
    self, indices: np.ndarray, max_len: int = 0, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Windows of some scenes.

    Args:
      indices: integers [b] within the split.
      max_len: of no meaning.
      key: (seed, step, number of the first row) for training windows, which are
        random, a function of it alone; None for the middles.

    Returns:
      inputs float32 [b, height, width, 3], normalised, 0 beyond the image; and
      targets int32 [b, height, width], -1 where not counted.
    """
    del max_len

    def one(row: int) -> tuple[np.ndarray, np.ndarray]:
      picture, annotation = self._open(int(indices[row]))
      if key is None or not self.augmented:
        return self._middle(picture, annotation)
      seed, step, first = key
      rng = np.random.default_rng([seed, 2, step, first + row])
      return self._window(picture, annotation, rng)

    made = list(pool().map(one, range(len(indices))))
    return {
      "inputs": np.stack([pixels for pixels, _ in made]),
      "targets": np.stack([labels for _, labels in made]),
    }

  def _open(self, k: int) -> tuple[Image.Image, Image.Image]:
    image = self.decoded(2 * k)
    # A class for every pixel: as it is stored, and of the image's size.
    annotation = self.decoded(
      2 * k + 1, formats=("PNG",), mode="L", size=image.size
    )
    return image, annotation

  def _labels(self, annotation: Image.Image) -> np.ndarray:
    labels = np.asarray(annotation).astype(np.int32)
    return np.where(labels > self.num_classes, 0, labels) - 1

  def _middle(
    self, picture: Image.Image, annotation: Image.Image
  ) -> tuple[np.ndarray, np.ndarray]:
    height, width, _ = self.shape
    size = short_side(picture.size, min(height, width))
    picture, annotation = _resized(picture, annotation, size)
    x, y = (size[0] - width) // 2, (size[1] - height) // 2
    return self._cut(picture, annotation, max(x, 0), max(y, 0))

  def _window(
    self,
    picture: Image.Image,
    annotation: Image.Image,
    rng: np.random.Generator,
  ) -> tuple[np.ndarray, np.ndarray]:
    height, width, _ = self.shape
    side = min(height, width) * rng.uniform(*SCALES)
    size = short_side(picture.size, side)
    picture, annotation = _resized(picture, annotation, size)
    for _ in range(10):
      x = int(rng.integers(max(size[0] - width, 0) + 1))
      y = int(rng.integers(max(size[1] - height, 0) + 1))
      part = annotation.crop((x, y, x + width, y + height))
      counts = np.bincount(np.asarray(part).ravel(), minlength=2)[1:]
      if (counts > 0).sum() > 1 and counts.max() < MOST * counts.sum():
        break
    if rng.random() < 0.5:
      picture, annotation = map(ImageOps.mirror, (picture, annotation))
      x = max(size[0] - width - x, 0)
    picture = _coloured(picture, rng)
    return self._cut(picture, annotation, x, y)

  def _cut(
    self, picture: Image.Image, annotation: Image.Image, x: int, y: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """A window, 0 and -1 beyond the image."""
    height, width, _ = self.shape
    own = np.s_[y : y + height, x : x + width]
    found = self.normalised(np.asarray(picture)[own])
    labels = self._labels(annotation)[own]
    rest = ((0, height - len(found)), (0, width - found.shape[1]))
    return np.pad(found, (*rest, (0, 0))), np.pad(
      labels, rest, constant_values=-1
    )


def short_side(size: tuple[int, int], side: float) -> tuple[int, int]:
  """(width, height) of short side `side`, the long one at most 4 times that."""
  low, high = min(size), max(size)
  scale = min(side / low, LONGEST * side / high)
  return tuple(max(round(own * scale), 1) for own in size)


def _resized(
  picture: Image.Image, annotation: Image.Image, size: tuple[int, int]
) -> tuple[Image.Image, Image.Image]:
  return (
    picture.resize(size, Image.Resampling.BILINEAR),
    annotation.resize(size, Image.Resampling.NEAREST),
  )


def _coloured(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
  """Brightness, contrast, saturation and hue, each changed half of the time."""
  if rng.random() < 0.5:
    added = int(rng.integers(-32, 33))
    table = [min(max(value + added, 0), 255) for value in range(256)]
    picture = picture.point(table * 3)
  for kind in (ImageEnhance.Contrast, ImageEnhance.Color):
    if rng.random() < 0.5:
      picture = kind(picture).enhance(rng.uniform(0.5, 1.5))
  if rng.random() < 0.5:
    turned = int(rng.integers(-18, 19)) * 256 // 360
    channels = list(picture.convert("HSV").split())
    table = [(value + turned) % 256 for value in range(256)]
    channels[0] = channels[0].point(table)
    picture = Image.merge("HSV", channels).convert("RGB")
  return picture


def windows(length: int, window: int, stride: int) -> tuple[int, ...]:
  """Where windows begin on a line: a stride apart, the last at the end."""
  if length <= window:
    return (0,)
  count = math.ceil((length - window) / stride)
  return (*(k * stride for k in range(count)), length - window)
