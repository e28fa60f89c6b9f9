"""Splits of scenes: images of any size with a class for each pixel."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from PIL import Image, ImageOps

from jaxformers.data.images.splits import Key, Pictures, pool

SCALES = (0.5, 2.0)  # Short sides of training images over the window's side.
MOST = 0.75  # Preferred largest share of one class in a training window.
BILINEAR, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST
Rng = np.random.Generator
LONGEST = 4.0  # Largest ratio of the long side to the short side.


@dataclasses.dataclass(frozen=True)
class Scenes(Pictures):
  """Pairs of an image file and an annotation file.

  Training cuts random windows from images whose short side is 0.5 to 2 times
  the side of a window. It avoids windows in which one class covers more than
  three quarters, and then mirrors windows and changes their colours at random,
  as in mmsegmentation, which Segmenter uses. `batch` without a key cuts the
  middle of every image, for evaluation; `scene` returns the whole image.

  Attributes:
    num_classes: number of classes, whose annotations are 1 to num_classes;
      pixels with annotation 0 are ignored.
    augmented: True if `batch` with a key cuts random windows.

  `Pictures` describes the other attributes. Here `packed` has the encoding
  `encodings.files("image", "annotation")`, and `shape` is the shape of a
  window.
  """

  num_classes: int
  augmented: bool = False

  def scene(self, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scene k: pixels uint8 [h, w, 3], and classes int32 [h, w].

    The class of ignored pixels is -1.
    """
    picture, annotation = self._open(k)
    return np.asarray(picture), self._labels(annotation)

  def batch(
    self, indices: np.ndarray, max_len: int = 0, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Returns a batch of windows, one of each scene.

    Args:
      indices: numbers of the scenes in the split, integers [b].
      max_len: ignored, because all windows have the same size.
      key: (seed, step, number of the first row), the seed of random training
        windows; None to cut the middles.

    Returns:
      inputs float32 [b, height, width, 3], normalised, 0 outside of the image;
      and targets int32 [b, height, width], -1 for ignored pixels.
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
    # The annotation must be grey, and as large as the image.
    annotation = self.decoded(
      2 * k + 1, formats=("PNG",), mode="L", size=image.size
    )
    return image, annotation

  def _labels(self, annotation: Image.Image) -> np.ndarray:
    """Returns classes from 0 on, int32 [h, w]; -1 for ignored pixels."""
    labels = np.asarray(annotation).astype(np.int32)
    return np.where(labels > self.num_classes, 0, labels) - 1

  def _middle(
    self, picture: Image.Image, annotation: Image.Image
  ) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the window in the middle, at the scale of evaluation."""
    # Scale the short side to the window, and cut the middle.
    height, width, _ = self.shape
    size = short_side(picture.size, min(height, width))
    x, y = (size[0] - width) // 2, (size[1] - height) // 2
    picture = resized(picture, size)
    annotation = annotation.resize(size, NEAREST)
    return self._cut(picture, annotation, max(x, 0), max(y, 0))

  def _window(
    self, picture: Image.Image, annotation: Image.Image, rng: Rng
  ) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a random window, and augments it for training."""
    # Scale the scene by a random factor.
    height, width, _ = self.shape
    side = min(height, width) * rng.uniform(*SCALES)
    size = short_side(picture.size, side)
    picture = resized(picture, size)
    annotation = annotation.resize(size, NEAREST)
    # Draw a window in which no class covers too much, at most ten times.
    for _ in range(10):
      x = int(rng.integers(max(size[0] - width, 0) + 1))
      y = int(rng.integers(max(size[1] - height, 0) + 1))
      part = annotation.crop((x, y, x + width, y + height))
      counts = np.bincount(np.asarray(part).ravel(), minlength=2)[1:]
      if (counts > 0).sum() > 1 and counts.max() < MOST * counts.sum():
        break
    # Mirror, and change the colours.
    if rng.random() < 0.5:
      picture, annotation = map(ImageOps.mirror, (picture, annotation))
      x = max(size[0] - width - x, 0)
    picture = _coloured(picture, rng)
    return self._cut(picture, annotation, x, y)

  def _cut(
    self, picture: Image.Image, annotation: Image.Image, x: int, y: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels and classes of the window at (x, y).

    Outside of the image, pixels are 0 and classes are -1.
    """
    height, width, _ = self.shape
    window = np.s_[y : y + height, x : x + width]
    pixels = self.normalised(np.asarray(picture)[window])
    labels = self._labels(annotation)[window]
    # Pad on the right and below if the image is smaller than the window.
    rest = ((0, height - len(pixels)), (0, width - pixels.shape[1]))
    pixels = np.pad(pixels, (*rest, (0, 0)))
    return pixels, np.pad(labels, rest, constant_values=-1)


def short_side(size: tuple[int, int], side: float) -> tuple[int, int]:
  """Returns (width, height) scaled so that the short side has `side` pixels.

  The long side has at most `LONGEST` * `side` pixels; if it would have more,
  both sides are reduced.
  """
  low, high = min(size), max(size)
  scale = min(side / low, LONGEST * side / high)
  width, height = (max(round(length * scale), 1) for length in size)
  return width, height


def resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
  """Returns a picture of another size (width, height), by bilinear sampling.

  A smaller picture skips pixels, as in Segmenter's code; Pillow's `resize`
  would average them.
  """
  across, down = (
    old / new for old, new in zip(picture.size, size, strict=True)
  )
  place = (across, 0, 0, 0, down, 0)
  return picture.transform(size, Image.Transform.AFFINE, place, BILINEAR)


def _coloured(picture: Image.Image, rng: Rng) -> Image.Image:
  """Changes brightness, contrast, saturation and hue, each half of the time.

  Source: `PhotoMetricDistortion` of mmsegmentation, with its parameters.
  """
  # Change the brightness by up to 32.
  if rng.random() < 0.5:
    added = int(rng.integers(-32, 33))
    table = [min(max(value + added, 0), 255) for value in range(256)]
    picture = picture.point(table * 3)
  # Scale the contrast before saturation and hue, or after them.
  is_first = rng.random() < 0.5
  contrast = _scaled(rng) if rng.random() < 0.5 else None
  if contrast and is_first:
    picture = picture.point(contrast * 3)
  same = list(range(256))
  scaled = _scaled(rng) if rng.random() < 0.5 else same
  # Turn the hue by up to 36 degrees, in steps of 2; HSV has 256 for 360.
  turned = 0
  if rng.random() < 0.5:
    turned = 2 * int(rng.integers(-18, 18)) * 256 // 360
  if turned or scaled is not same:
    hue, saturation, value = picture.convert("HSV").split()
    hue = hue.point([(h + turned) % 256 for h in same])
    parts = (hue, saturation.point(scaled), value)
    picture = Image.merge("HSV", parts).convert("RGB")
  return picture if is_first or not contrast else picture.point(contrast * 3)


def _scaled(rng: Rng) -> list[int]:
  """Returns the table of a scale of 0.5 to 1.5 for bytes."""
  scale = rng.uniform(0.5, 1.5)
  return [min(int(scale * value), 255) for value in range(256)]


def windows(length: int, window: int, stride: int) -> tuple[int, ...]:
  """Returns the starts of windows on a line; the last window ends at its end.

  Args:
    length: number of pixels of the line.
    window: number of pixels of a window.
    stride: number of pixels between the starts of two windows.
  """
  if length <= window:
    return (0,)
  count = math.ceil((length - window) / stride)
  return (*(k * stride for k in range(count)), length - window)
