"""DeiT's augmentation of images, on the host, as pure functions of a generator.

Touvron et al. 2021, https://arxiv.org/abs/2012.12877, table 9, as their code
has it through timm: crops and flips, RandAugment "rand-m9-mstd0.5-inc1", random
erasing of pixels, mixup and cutmix. Pillow changes the pixels; what is ours is
the policy, for timm's draws from global generators, and a run that is taken up
again could not see the same images.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxformers.errors import UserError

BICUBIC = Image.Resampling.BICUBIC  # As DeiT has it for all of them.
MEAN_COLOUR = (124, 116, 104)  # Of ImageNet.
Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Augment:
  """What is done to training images; the defaults do nothing.

  Attributes:
    crop: "pad" shifts by up to 4 pixels over a black border, "resized" takes
      a part of 8 to 100 % of the area with sides 3:4 to 4:3, "" the middle.
    flip: whether half of the images are mirrored.
    randaugment: magnitude, 0 to 10, of two operations drawn of fifteen, each
      done to half of the images; 0 for none. DeiT: 9.
    color_jitter: brightness, contrast and saturation change by factors of up to
      1 -+ this; 0 for none. Not together with randaugment: DeiT's code leaves
      it out then.
    erase: share of images of which a box becomes noise. DeiT: 0.25.
    mixup: alpha of the Beta distribution of two images' shares; 0 for none.
      DeiT: 0.8.
    cutmix: the same of the area of a box that comes from another image; with
      both, either is done to half of the batches. DeiT: 1.0.
    repeats: how often an image stands in a batch, augmented apart (Hoffer et
      al. 2020). DeiT: 3.

  Raises:
    UserError: for what is out of range.
  """

  crop: str = ""
  flip: bool = False
  randaugment: float = 0.0
  color_jitter: float = 0.0
  erase: float = 0.0
  mixup: float = 0.0
  cutmix: float = 0.0
  repeats: int = 1

  def __post_init__(self) -> None:
    if self.crop not in ("", "pad", "resized"):
      raise UserError(
        f'augment.crop={self.crop!r}: choose "pad", "resized" or "".'
      )
    highest = {"randaugment": 10, "color_jitter": 1, "erase": 1}
    for name in ("randaugment", "color_jitter", "erase", "mixup", "cutmix"):
      value, most = getattr(self, name), highest.get(name, math.inf)
      if not 0 <= value <= most:
        raise UserError(f"augment.{name}={value} is not in [0, {most}].")
    if self.randaugment and self.color_jitter:
      raise UserError(
        "augment.randaugment and augment.color_jitter are not done together: "
        "leave one of them 0."
      )
    if self.repeats < 1:
      raise UserError(f"augment.repeats={self.repeats}: it is at least 1.")


def image(
  picture: Image.Image, size: tuple[int, int], how: Augment, rng: Rng
) -> Image.Image:
  """Crops, flips and distorts one picture.

  Args:
    picture: RGB, of any size.
    size: (height, width) of the result.
    how: of which crop, flip, randaugment and color_jitter are done here.
    rng: draws what is random.
  """
  height, width = size
  if how.crop == "resized":
    box = _part(picture, rng)
    picture = picture.resize((width, height), BICUBIC, box)
  elif how.crop == "pad":
    picture = fit(picture, size)
    padded = ImageOps.expand(picture, 4)
    x, y = rng.integers(0, 9, 2).tolist()
    picture = padded.crop((x, y, x + width, y + height))
  else:
    picture = fit(picture, size)
  if how.flip and rng.random() < 0.5:
    picture = ImageOps.mirror(picture)
  if how.randaugment:
    picture = randaugment(picture, how.randaugment, rng)
  for enhance in (
    (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    if how.color_jitter
    else ()
  ):
    factor = rng.uniform(1 - how.color_jitter, 1 + how.color_jitter)
    picture = enhance(picture).enhance(factor)
  return picture


def fit(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
  """The middle of a picture, as in evaluation: 7/8 of its short side, bicubic.

  A picture that has the size already stays as it is.
  """
  height, width = size
  if picture.size == (width, height):
    return picture
  scale = max(height, width) * 8 / 7 / min(picture.size)
  resized = [
    max(round(side * scale), own)
    for side, own in zip(picture.size, (width, height), strict=True)
  ]
  picture = picture.resize(tuple(resized), BICUBIC)
  x, y = (resized[0] - width) // 2, (resized[1] - height) // 2
  return picture.crop((x, y, x + width, y + height))


def _part(picture: Image.Image, rng: Rng) -> tuple[float, ...]:
  """A box of 8 to 100 % of the area and sides 3:4 to 4:3; else the middle."""
  width, height = picture.size
  for _ in range(10):
    area = width * height * rng.uniform(0.08, 1.0)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < w <= width and 0 < h <= height:
      x, y = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
      return x, y, x + w, y + h
  side = min(width, height * 4 / 3), min(height, width * 4 / 3)
  x, y = (width - side[0]) / 2, (height - side[1]) / 2
  return x, y, x + side[0], y + side[1]


def _affine(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
  return picture.transform(
    picture.size,
    Image.Transform.AFFINE,
    matrix,
    BICUBIC,
    fillcolor=MEAN_COLOUR,
  )


def _sign(rng: Rng) -> float:
  return -1.0 if rng.random() < 0.5 else 1.0


def _enhance(kind: type) -> Callable[[Image.Image, float, Rng], Image.Image]:
  def apply(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
    return kind(picture).enhance(max(0.1, 1 + 0.9 * share * _sign(rng)))

  return apply


def _rotate(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  angle = 30 * share * _sign(rng)
  return picture.rotate(angle, BICUBIC, fillcolor=MEAN_COLOUR)


def _shear_x(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  return _affine(picture, (1, 0.3 * share * _sign(rng), 0, 0, 1, 0))


def _shear_y(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  return _affine(picture, (1, 0, 0, 0.3 * share * _sign(rng), 1, 0))


def _move_x(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  pixels = 0.45 * share * _sign(rng) * picture.size[0]
  return _affine(picture, (1, 0, pixels, 0, 1, 0))


def _move_y(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  pixels = 0.45 * share * _sign(rng) * picture.size[1]
  return _affine(picture, (1, 0, 0, 0, 1, pixels))


def _posterize(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  del rng
  bits = 4 - int(4 * share)
  return ImageOps.posterize(picture, bits) if bits else picture.point([0] * 768)


def _solarize(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  del rng
  return ImageOps.solarize(picture, 256 - min(256, int(256 * share)))


def _solarize_add(picture: Image.Image, share: float, rng: Rng) -> Image.Image:
  del rng
  added = min(128, int(110 * share))
  table = [min(255, v + added) if v < 128 else v for v in range(256)]
  return picture.point(table * 3)


# Of timm's set "increasing": a larger magnitude makes all of them stronger.
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
  "shear_x": _shear_x,
  "shear_y": _shear_y,
  "translate_x": _move_x,
  "translate_y": _move_y,
}


def randaugment(
  picture: Image.Image, magnitude: float, rng: Rng
) -> Image.Image:
  """Two operations of fifteen, each done to half of the pictures.

  Source: Cubuk et al. 2020, https://arxiv.org/abs/1909.13719, in timm's form
  with magnitudes normal around the given one, deviation 0.5.
  """
  names = list(OPERATIONS)
  for which in rng.integers(0, len(names), 2).tolist():
    if rng.random() < 0.5:
      own = min(max(rng.normal(magnitude, 0.5), 0.0), 10.0)
      picture = OPERATIONS[names[which]](picture, own / 10, rng)
  return picture


def erase(pixels: np.ndarray, rng: Rng) -> None:
  """Fills a box of one image with normal noise, in place.

  Of 2 to 33 % of the area and sides 0.3 to 3.3 (Zhong et al. 2020, in timm's
  form).

  Args:
    pixels: float32 [height, width, c], normalised.
    rng: draws the box and the noise.
  """
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
  """Mixes the images of a batch in pairs of neighbours, all in one way.

  Sources: Zhang et al. 2018, https://arxiv.org/abs/1710.09412; Yun et al. 2019,
  https://arxiv.org/abs/1905.04899. In pairs of neighbours, and not of first and
  last as in timm, so that hosts that hold a part of the batch need no other.

  Args:
    images: float32 [b, height, width, c].
    targets: int32 [b].
    how: of which mixup and cutmix are done here.
    rng: draws once for the whole batch.

  Returns:
    `inputs`, `targets`, `others` (the class of the other image) and `shares`
    (of the target), float32 [b].
  """
  partner = np.arange(len(images)) ^ 1
  partner[partner == len(images)] = len(images) - 1  # The odd one out.
  cut = how.cutmix > 0 and (not how.mixup or rng.random() < 0.5)
  share = rng.beta(*[how.cutmix if cut else how.mixup] * 2)
  if cut:
    height, width = images.shape[1:3]
    side = math.sqrt(1 - share)
    y, x = rng.integers(height), rng.integers(width)
    h, w = int(height * side) // 2, int(width * side) // 2
    rows = slice(max(y - h, 0), min(y + h, height))
    columns = slice(max(x - w, 0), min(x + w, width))
    mixed = images.copy()
    mixed[:, rows, columns] = images[partner, rows, columns]
    boxed = (rows.stop - rows.start) * (columns.stop - columns.start)
    share = 1 - boxed / (height * width)
  else:
    mixed = share * images + (1 - share) * images[partner]
  return {
    "inputs": mixed.astype(np.float32),
    "targets": targets,
    "others": targets[partner],
    "shares": np.full(len(images), share, np.float32),
  }
