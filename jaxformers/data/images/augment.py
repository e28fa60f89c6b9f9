"""DeiT's augmentation of images on the host, as pure functions of a generator.

Follows table 9 of Touvron et al. 2021, https://arxiv.org/abs/2012.12877, their
code and timm: crops and flips, RandAugment "rand-m9-mstd0.5-inc1", random
erasing, mixup and cutmix. Pillow changes the pixels. timm itself is not used:
it draws from global generators, so a resumed run would read other images.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, Share, SmallCount, Weight

BICUBIC = Image.Resampling.BICUBIC  # DeiT's filter for every operation.
MEAN_COLOUR = (124, 116, 104)  # Mean colour of ImageNet.
Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Augment:
  """Settings of the augmentation of training images; the defaults do nothing.

  Attributes:
    crop: "pad" shifts images by up to 4 pixels over a black border; "resized"
      crops a box with 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3;
      "" crops the middle.
    flip: True to mirror half of the images.
    randaugment: magnitude, 0 to 10, of two operations drawn from fifteen, each
      applied to half of the images; 0 for none. DeiT: 9.
    color_jitter: largest relative change of brightness, contrast and
      saturation; 0 for none. It cannot be combined with randaugment, with which
      DeiT's code ignores it.
    erase: share of images in which a box is replaced by noise. DeiT: 0.25.
    mixup: alpha of the Beta distribution of the weights of two images; 0 for
      none. DeiT: 0.8.
    cutmix: alpha of the Beta distribution of the area of a box that is copied
      from another image; 0 for none. With mixup, each is applied to half of the
      batches. DeiT: 1.0.
    repeats: number of copies of an image in a batch, each augmented differently
      (Hoffer et al. 2020). DeiT: 3.

  Raises:
    UserError: for a value out of range.
  """

  crop: str = ""
  flip: bool = False
  randaugment: Annotated[float, Interval("[0, 10]")] = 0.0
  color_jitter: Share = 0.0
  erase: Share = 0.0
  mixup: Weight = 0.0
  cutmix: Weight = 0.0
  repeats: SmallCount = 1

  def __post_init__(self) -> None:
    if self.crop not in ("", "pad", "resized"):
      raise UserError(
        f'augment.crop={self.crop!r}: choose "pad", "resized" or "".'
      )
    ranges.check(Augment, vars(self), "augment")
    # Refuse a combination for which DeiT's code silently ignores the jitter.
    if self.randaugment and self.color_jitter:
      raise UserError(
        "augment.randaugment and augment.color_jitter cannot be combined: "
        "leave one of them 0."
      )
    if self.repeats < 1:
      raise UserError(f"augment.repeats={self.repeats}: choose 1 or more.")


def image(
  picture: Image.Image, size: tuple[int, int], how: Augment, rng: Rng
) -> Image.Image:
  """Crops, flips and distorts a picture.

  Args:
    picture: RGB image of any size.
    size: (height, width) of the result.
    how: settings, of which crop, flip, randaugment and color_jitter are used.
    rng: generator of all random draws.
  """
  height, width = size
  # Crop a random box, or the middle.
  if how.crop == "resized":
    picture = picture.resize((width, height), BICUBIC, _part(picture, rng))
  else:
    picture = fit(picture, size)
  # Shift by up to 4 pixels.
  if how.crop == "pad":
    x, y = rng.integers(0, 9, 2).tolist()
    padded = ImageOps.expand(picture, 4)
    picture = padded.crop((x, y, x + width, y + height))
  # Mirror, and distort shapes and colours.
  if how.flip and rng.random() < 0.5:
    picture = ImageOps.mirror(picture)
  if how.randaugment:
    picture = randaugment(picture, how.randaugment, rng)
  # Scale brightness, contrast and saturation by 1 - jitter to 1 + jitter.
  if how.color_jitter:
    for kind in ("Brightness", "Contrast", "Color"):
      factor = rng.uniform(1 - how.color_jitter, 1 + how.color_jitter)
      picture = getattr(ImageEnhance, kind)(picture).enhance(factor)
  return picture


def fit(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
  """Returns the middle 7/8 of the short side of a picture, resized to `size`.

  Used for evaluation. Resizes with a bicubic filter; returns a picture that has
  the size already unchanged.

  Args:
    picture: image of any size.
    size: (height, width) of the result.
  """
  height, width = size
  if picture.size == (width, height):
    return picture
  # Resize so that the crop is 7/8 of the short side, and crop the middle.
  scale = max(height, width) * 8 / 7 / min(picture.size)
  resized = [
    max(round(side * scale), least)
    for side, least in zip(picture.size, (width, height), strict=True)
  ]
  picture = picture.resize((resized[0], resized[1]), BICUBIC)
  x, y = (resized[0] - width) // 2, (resized[1] - height) // 2
  return picture.crop((x, y, x + width, y + height))


def _part(picture: Image.Image, rng: Rng) -> tuple[float, float, float, float]:
  """Draws a box with 8 to 100 % of the area and a ratio of 3:4 to 4:3."""
  # Draw area and ratio until a box fits, at most ten times.
  width, height = picture.size
  for _ in range(10):
    area = width * height * rng.uniform(0.08, 1.0)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < w <= width and 0 < h <= height:
      x, y = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
      return x, y, x + w, y + h
  # If no box fits, take the largest one in the middle, as torchvision does.
  side = min(width, height * 4 / 3), min(height, width * 4 / 3)
  left, top = (width - side[0]) / 2, (height - side[1]) / 2
  return left, top, left + side[0], top + side[1]


def _sign(rng: Rng) -> float:
  """Draws -1 or 1."""
  return -1.0 if rng.random() < 0.5 else 1.0


def _enhance(kind: type) -> Callable[[Image.Image, float, Rng], Image.Image]:
  """Returns the operation that enhances by max(0.1, 1 +- 0.9 share)."""

  def apply(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
    return kind(picture).enhance(max(0.1, 1 + 0.9 * share * _sign(rng)))

  return apply


def _rotate(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  angle = 30 * share * _sign(rng)
  return picture.rotate(angle, BICUBIC, fillcolor=MEAN_COLOUR)


def _affine(
  entry: int, most: float, side: int | None = None
) -> Callable[[Image.Image, float, Rng], Image.Image]:
  """Returns the operation that changes one entry of (1, 0, 0, 0, 1, 0).

  The six numbers are the matrix of an affine map.

  Args:
    entry: index of the entry: 1 or 3 to shear, 2 or 5 to move along x or y.
    most: value of the entry at share 1.
    side: 0 or 1 if `most` is a share of the width or of the height; None if it
      is the entry itself.
  """

  def apply(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
    value = most * share * _sign(rng)
    matrix: list[float] = [1, 0, 0, 0, 1, 0]
    matrix[entry] = value if side is None else value * picture.size[side]
    kind = Image.Transform.AFFINE
    return picture.transform(
      picture.size, kind, matrix, BICUBIC, fillcolor=MEAN_COLOUR
    )

  return apply


def _posterize(picture: Image.Image, share: float, _: Rng) -> Image.Image:
  bits = 4 - int(4 * share)
  return ImageOps.posterize(picture, bits) if bits else picture.point([0] * 768)


def _solarize(picture: Image.Image, share: float, _: Rng) -> Image.Image:
  return ImageOps.solarize(picture, 256 - min(256, int(256 * share)))


def _solarize_add(picture: Image.Image, share: float, _: Rng) -> Image.Image:
  added = min(128, int(110 * share))
  table = [min(255, v + added) if v < 128 else v for v in range(256)]
  return picture.point(table * 3)


# timm's "increasing" operations: a larger magnitude makes each one stronger.
OPERATIONS: dict[str, Callable[[Image.Image, float, Rng], Image.Image]] = {
  "autocontrast": lambda picture, share, rng: ImageOps.autocontrast(picture),
  "equalize": lambda picture, share, rng: ImageOps.equalize(picture),
  "invert": lambda picture, share, rng: ImageOps.invert(picture),
  "rotate": _rotate,
  "posterize": _posterize,
  "solarize": _solarize,
  "solarize_add": _solarize_add,
  "color": _enhance(ImageEnhance.Color),
  "contrast": _enhance(ImageEnhance.Contrast),
  "brightness": _enhance(ImageEnhance.Brightness),
  "sharpness": _enhance(ImageEnhance.Sharpness),
  "shear_x": _affine(1, 0.3),
  "shear_y": _affine(3, 0.3),
  "translate_x": _affine(2, 0.45, side=0),
  "translate_y": _affine(5, 0.45, side=1),
}


def randaugment(
  picture: Image.Image, magnitude: float, rng: Rng
) -> Image.Image:
  """Applies two random operations, each with probability one half.

  Source: Cubuk et al. 2020, https://arxiv.org/abs/1909.13719, in timm's form:
  magnitudes are drawn from a normal distribution with mean `magnitude` and
  deviation 0.5.
  """
  # Draw two operations, which may be equal.
  operations = list(OPERATIONS.values())
  for number in rng.integers(0, len(operations), 2).tolist():
    if rng.random() < 0.5:
      drawn = min(max(rng.normal(magnitude, 0.5), 0.0), 10.0)
      picture = operations[number](picture, drawn / 10, rng)
  return picture


def erase(pixels: np.ndarray, rng: Rng) -> None:
  """Fills a box of one image with normal noise, in place.

  The box has 2 to 33 % of the area and an aspect ratio of 0.3 to 3.3 (Zhong et
  al. 2020, in timm's form).

  Args:
    pixels: normalised pixels, float32 [height, width, c].
    rng: generator of the box and of the noise.
  """
  # Draw area and ratio until a box fits; erase nothing if ten draws fail.
  height, width, channels = pixels.shape
  for _ in range(10):
    area = height * width * rng.uniform(0.02, 1 / 3)
    ratio = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
    h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < h < height and 0 < w < width:
      y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
      noise = rng.standard_normal((h, w, channels), np.float32)
      pixels[y : y + h, x : x + w] = noise
      return


def mix(
  images: np.ndarray, targets: np.ndarray, how: Augment, rng: Rng
) -> dict[str, np.ndarray]:
  """Applies mixup or cutmix to a batch, with the same weights for all images.

  Mixes every image with its neighbour in the batch.

  Sources: Zhang et al. 2018, https://arxiv.org/abs/1710.09412; Yun et al. 2019,
  https://arxiv.org/abs/1905.04899.

  Differs from timm, which pairs the first image with the last one. With pairs
  of neighbours every host can mix its part of the batch without the others.

  Args:
    images: pixels, float32 [b, height, width, c].
    targets: classes, int32 [b].
    how: settings, of which mixup and cutmix are used.
    rng: generator; it draws once for the whole batch.

  Returns:
    `inputs`, float32 [b, height, width, c]; `targets`, int32 [b]; `others`, the
    classes of the other images, int32 [b]; and `shares`, the weights of the
    targets, float32 [b].
  """
  # Pair neighbours; an odd last image is paired with itself.
  partner = np.arange(len(images)) ^ 1
  partner[partner == len(images)] = len(images) - 1
  # Choose cutmix or mixup, and draw the weight of the image.
  cut = how.cutmix > 0 and (not how.mixup or rng.random() < 0.5)
  alpha = how.cutmix if cut else how.mixup
  share = rng.beta(alpha, alpha)
  if cut:
    # Copy a box with the area 1 - share from the partner; cut it at the border.
    height, width = images.shape[1:3]
    side = math.sqrt(1 - share)
    y, x = rng.integers(height), rng.integers(width)
    h, w = int(height * side) // 2, int(width * side) // 2
    rows = slice(max(y - h, 0), min(y + h, height))
    columns = slice(max(x - w, 0), min(x + w, width))
    mixed = images.copy()
    mixed[:, rows, columns] = images[partner, rows, columns]
    # Weight the classes by the area that was actually copied.
    boxed = (rows.stop - rows.start) * (columns.stop - columns.start)
    share = 1 - boxed / (height * width)
  else:
    # Mixup: share * image + (1 - share) * partner.
    mixed = share * images + (1 - share) * images[partner]
  return {
    "inputs": mixed.astype(np.float32),
    "targets": targets,
    "others": targets[partner],
    "shares": np.full(len(images), share, np.float32),
  }
