"""Splits of scenes: images of any size, and a class for each pixel."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxformers.data.images.splits import Key, Pictures, pool

SCALES = (0.5, 2.0)  # Short sides of training images, in sides of a window.
MOST = 0.75  # Largest share of a training window for one class, if possible.
BILINEAR, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST
Rng = np.random.Generator
LONGEST = 4.0  # Largest ratio of the long side to the short side.


@dataclasses.dataclass(frozen=True)
class Scenes(Pictures):
  """Images and annotations, pairs of files.

  Training windows are cut from images scaled by 0.5 to 2, so that if possible
  no class covers more than three quarters, then mirrored and changed in colour
  at random, as in mmsegmentation, which Segmenter uses. Evaluation by `batch`
  sees the middle of every image; `scene` returns all of it.

  Attributes:
    num_classes: annotations are 1 to num_classes; 0 is not counted.
    augmented: True if `batch` with a key cuts random windows.

  The others are those of `Pictures`: `packed` has the encoding
  `encodings.files("image", "annotation")`, and `shape` is that of a window.
  """

  num_classes: int
  augmented: bool = False

  def scene(self, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scene k: uint8 [h, w, 3], and int32 [h, w], -1 if not counted."""
    picture, annotation = self._open(k)
    return np.asarray(picture), self._labels(annotation)

  def batch(
    self, indices: np.ndarray, max_len: int = 0, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Returns a batch of windows, one of each scene.

    Args:
      indices: integers [b] within the split.
      max_len: ignored; windows have one size.
      key: (seed, step, number of the first row), from which random training
        windows are drawn; None for the middles.

    Returns:
      inputs float32 [b, height, width, 3], normalised, 0 beyond the image; and
      targets int32 [b, height, width], -1 where not counted.
    """
    del max_len

    def window(row: int) -> tuple[np.ndarray, np.ndarray]:
      picture, annotation = self._open(int(indices[row]))
      if key is None or not self.augmented:
        return self._middle(picture, annotation)
      seed, step, first = key
      rng = np.random.default_rng([seed, 2, step, first + row])
      return self._window(picture, annotation, rng)

    inputs, targets = zip(*pool().map(window, range(len(indices))), strict=True)
    return {"inputs": np.stack(inputs), "targets": np.stack(targets)}

  def _open(self, k: int) -> tuple[Image.Image, Image.Image]:
    image = self.decoded(2 * k)
    # A class for every pixel: no conversion, and the size of the image.
    annotation = self.decoded(
      2 * k + 1, formats=("PNG",), mode="L", size=image.size
    )
    return image, annotation

  def _labels(self, annotation: Image.Image) -> np.ndarray:
    """Returns classes from 0, int32 [h, w]; -1 where not counted."""
    labels = np.asarray(annotation).astype(np.int32)
    return np.where(labels > self.num_classes, 0, labels) - 1

  def _middle(
    self, picture: Image.Image, annotation: Image.Image
  ) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the window in the middle, at the scale of evaluation."""
    height, width, _ = self.shape
    size = short_side(picture.size, min(height, width))
    x, y = (size[0] - width) // 2, (size[1] - height) // 2
    picture = picture.resize(size, BILINEAR)
    annotation = annotation.resize(size, NEAREST)
    return self._cut(picture, annotation, max(x, 0), max(y, 0))

  def _window(
    self, picture: Image.Image, annotation: Image.Image, rng: Rng
  ) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a random window and changes it, as for training."""
    # Scale the scene.
    height, width, _ = self.shape
    side = min(height, width) * rng.uniform(*SCALES)
    size = short_side(picture.size, side)
    picture = picture.resize(size, BILINEAR)
    annotation = annotation.resize(size, NEAREST)
    # Draw a window in which no class covers too much, ten times at most.
    for _ in range(10):
      x = int(rng.integers(max(size[0] - width, 0) + 1))
      y = int(rng.integers(max(size[1] - height, 0) + 1))
      part = annotation.crop((x, y, x + width, y + height))
      counts = np.bincount(np.asarray(part).ravel(), minlength=2)[1:]
      if (counts > 0).sum() > 1 and counts.max() < MOST * counts.sum():
        break
    # Mirror, and change colours.
    if rng.random() < 0.5:
      picture, annotation = map(ImageOps.mirror, (picture, annotation))
      x = max(size[0] - width - x, 0)
    picture = _coloured(picture, rng)
    return self._cut(picture, annotation, x, y)

  def _cut(
    self, picture: Image.Image, annotation: Image.Image, x: int, y: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the window at (x, y), with 0 and -1 beyond the image."""
    height, width, _ = self.shape
    window = np.s_[y : y + height, x : x + width]
    pixels = self.normalised(np.asarray(picture)[window])
    labels = self._labels(annotation)[window]
    # Pad on the right and below where the image is smaller than a window.
    rest = ((0, height - len(pixels)), (0, width - pixels.shape[1]))
    pixels = np.pad(pixels, (*rest, (0, 0)))
    return pixels, np.pad(labels, rest, constant_values=-1)


def short_side(size: tuple[int, int], side: float) -> tuple[int, int]:
  """Returns (width, height) scaled so that the short side has `side` pixels.

  The long side has at most `LONGEST` times as many.
  """
  low, high = min(size), max(size)
  scale = min(side / low, LONGEST * side / high)
  width, height = (max(round(length * scale), 1) for length in size)
  return width, height


def _coloured(picture: Image.Image, rng: Rng) -> Image.Image:
  """Changes brightness, contrast, saturation and hue, each half of the time."""
  # Brightness.
  if rng.random() < 0.5:
    added = int(rng.integers(-32, 33))
    table = [min(max(value + added, 0), 255) for value in range(256)]
    picture = picture.point(table * 3)
  # Contrast and saturation.
  for kind in (ImageEnhance.Contrast, ImageEnhance.Color):
    if rng.random() < 0.5:
      picture = kind(picture).enhance(rng.uniform(0.5, 1.5))
  # Hue, an angle in 256 steps.
  if rng.random() < 0.5:
    turned = int(rng.integers(-18, 19)) * 256 // 360
    hue, *others = picture.convert("HSV").split()
    hue = hue.point([(value + turned) % 256 for value in range(256)])
    picture = Image.merge("HSV", (hue, *others)).convert("RGB")
  return picture


def windows(length: int, window: int, stride: int) -> tuple[int, ...]:
  """Returns where windows begin on a line: a stride apart, the last at its end.

  Args:
    length: pixels of the line.
    window: pixels of a window.
    stride: pixels between the starts of two windows.
  """
  if length <= window:
    return (0,)
  count = math.ceil((length - window) / stride)
  return (*(k * stride for k in range(count)), length - window)
