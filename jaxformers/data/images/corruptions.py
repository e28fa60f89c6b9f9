"""Corruptions of images in five severities, with the strengths of CIFAR-10-C.

Source: Hendrycks and Dietterich 2019, https://arxiv.org/abs/1903.12261.

Differs from the source: frost is missing, the fifteenth corruption, because it
needs the authors' photographs of ice. For motion blur and snow, for which the
authors' code calls ImageMagick, the blur here is a line of normal weights.
Scores are therefore not comparable with scores on CIFAR-10-C.

A corruption is a function of pixels in [0, 1], float64 [h, w, 3], of a
generator, and of the strength of a severity, which is one or several numbers.
`corrupt` clips the resulting pixels to [0, 1]. The decorator of a corruption
lists the authors' strengths for severities 1 to 5.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from jaxformers.data.engine import pictures
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

SEVERITIES = (1, 2, 3, 4, 5)

Rng = np.random.Generator
Corruption = Callable[..., np.ndarray]
# Function and strengths of every corruption, by name.
CORRUPTIONS: dict[str, tuple[Corruption, list[tuple[Any, ...]]]] = {}


def _register(*strengths: Any) -> Callable[[Corruption], Corruption]:
  """Returns a decorator that adds a corruption with its five strengths.

  Args:
    *strengths: a number, or a tuple of numbers, for each severity.
  """

  def add(function: Corruption) -> Corruption:
    arguments = [s if isinstance(s, tuple) else (s,) for s in strengths]
    CORRUPTIONS[function.__name__] = function, arguments
    return function

  return add


def corrupt(
  pixels: np.ndarray, name: str, severity: int, seed: int = 0
) -> np.ndarray:
  """Corrupts an image: uint8 [h, w, 3] -> uint8 [h, w, 3].

  Args:
    pixels: pixels of one image.
    name: name of the corruption in `CORRUPTIONS`.
    severity: severity from 1 to 5.
    seed: seed of the generator, combined with the name and the severity.

  Raises:
    UserError: for an unknown name or severity.
  """
  choose("corruption", name, CORRUPTIONS)
  if severity not in SEVERITIES:
    raise UserError(f"severity={severity}: choose one from 1 to 5.")
  # Corrupt pixels in [0, 1], then clip and round to 8 bits.
  rng = np.random.default_rng([seed, severity, zlib.crc32(name.encode())])
  function, strengths = CORRUPTIONS[name]
  corrupted = function(pixels / 255.0, rng, *strengths[severity - 1])
  return np.round(np.clip(corrupted, 0, 1) * 255).astype(np.uint8)


@_register(0.04, 0.06, 0.08, 0.09, 0.10)
def gaussian_noise(x: np.ndarray, rng: Rng, deviation: float) -> np.ndarray:
  """Adds normal noise to every value."""
  return x + rng.normal(0, deviation, x.shape)


@_register(500, 250, 100, 75, 50)
def shot_noise(x: np.ndarray, rng: Rng, photons: int) -> np.ndarray:
  """Draws every value from the Poisson distribution of a photon count."""
  return rng.poisson(x * photons) / photons


@_register(0.01, 0.02, 0.03, 0.05, 0.07)
def impulse_noise(x: np.ndarray, rng: Rng, share: float) -> np.ndarray:
  """Sets random values to 0 or 1 (salt and pepper)."""
  hit = rng.random(x.shape) < share
  return np.where(hit, rng.integers(0, 2, x.shape), x)


def _blurred(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
  """Convolves every channel with a kernel [k, k]."""
  return ndimage.convolve(x, kernel[..., None], mode="mirror")


@_register((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))
def defocus_blur(
  x: np.ndarray, rng: Rng, radius: float, smooth: float
) -> np.ndarray:
  """Blurs with a disc that has a smoothed edge."""
  # Draw the disc on a grid of 17 x 17 pixels, and smooth its edge.
  at = np.arange(-8, 9)
  disc = (at[:, None] ** 2 + at[None] ** 2 <= radius**2).astype(float)
  kernel = ndimage.gaussian_filter(disc / disc.sum(), smooth, radius=1)
  return _blurred(x, kernel)


@_register((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
def glass_blur(
  x: np.ndarray, rng: Rng, sigma: float, most: int, times: int
) -> np.ndarray:
  """Replaces pixels by neighbours above and to the left, between two blurs.

  The paper swaps neighbours. The authors' code, and therefore CIFAR-10-C,
  copies one pixel over the other; this function does too.
  """
  # Blur, copy pixels over their neighbours, and blur again.
  x = ndimage.gaussian_filter(x, (sigma, sigma, 0))
  rows, columns = np.indices(x.shape[:2])
  for _ in range(times):
    down, right = rng.integers(-most, most, (2, *x.shape[:2]))
    x = x[np.maximum(rows + down, 0), np.maximum(columns + right, 0)]
  return ndimage.gaussian_filter(x, (sigma, sigma, 0))


def _line(radius: int, sigma: float, angle: float) -> np.ndarray:
  """Returns a kernel of normal weights on a line from the middle outwards."""
  size = 2 * radius + 1
  kernel = np.zeros((size, size))
  # Add exp(-step^2 / (2 sigma^2)) every quarter pixel along the line.
  for step in np.arange(0, radius, 0.25):
    y = radius + step * np.sin(np.deg2rad(angle))
    x = radius + step * np.cos(np.deg2rad(angle))
    kernel[round(y), round(x)] += np.exp(-(step**2) / (2 * sigma**2))
  return kernel / kernel.sum()


@_register((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))
def motion_blur(
  x: np.ndarray, rng: Rng, radius: int, sigma: float
) -> np.ndarray:
  """Blurs along a line at a random angle of -45 to 45 degrees."""
  return _blurred(x, _line(radius, sigma, rng.uniform(-45, 45)))


def _sample(x: np.ndarray, places: Any, mode: str = "constant") -> np.ndarray:
  """Interpolates an image bilinearly at places [2, h, w]."""
  channels = [
    ndimage.map_coordinates(channel, places, order=1, mode=mode)
    for channel in np.moveaxis(x, -1, 0)
  ]
  return np.stack(channels, -1)


def _zoomed(x: np.ndarray, factor: float) -> np.ndarray:
  """Enlarges the middle of an image bilinearly to the size of the image."""
  # Read at places that are nearer to the middle by the factor.
  height, width = x.shape[:2]
  rows, columns = (
    np.clip((np.arange(n) - (n - 1) / 2) / factor + (n - 1) / 2, 0, n - 1)
    for n in (height, width)
  )
  return _sample(x, np.meshgrid(rows, columns, indexing="ij"))


@_register(1.06, 1.11, 1.16, 1.21, 1.26)
def zoom_blur(x: np.ndarray, rng: Rng, most: float) -> np.ndarray:
  """Averages the image and several enlargements of its middle."""
  factors = np.arange(1, most, 0.01)
  return np.mean([x, *(_zoomed(x, f) for f in factors)], axis=0)


@_register(
  (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
  (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
  (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
  (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
  (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
)
def snow(x: np.ndarray, rng: Rng, *strength: Any) -> np.ndarray:
  """Adds falling flakes to a whitened image."""
  mean, deviation, zoom, least, radius, sigma, share = strength
  # Draw flakes: the largest values of noise, blurred along a slanted line.
  flakes = _zoomed(rng.normal(mean, deviation, x.shape[:2])[..., None], zoom)
  flakes = np.where(flakes < least, 0, flakes)
  angle = rng.uniform(-135, -45)
  flakes = np.clip(_blurred(flakes, _line(radius, sigma, angle)), 0, 1)
  # Whiten the image, and add the flakes and the flakes turned by 180 degrees.
  grey = (x @ np.array([0.299, 0.587, 0.114]))[..., None]
  white = np.maximum(x, grey * 1.5 + 0.5)
  return share * x + (1 - share) * white + flakes + np.rot90(flakes, 2)


def plasma(size: int, decay: float, rng: Rng) -> np.ndarray:
  """Draws a cloud in [0, 1] with the diamond-square algorithm.

  Args:
    size: pixels per side, a power of two.
    decay: divisor of the roughness from each scale to the next finer one.
    rng: generator of the noise.

  Returns:
    float64 [size, size].
  """
  cloud = np.zeros((size, size))
  step, rough = size, 1.0
  while step >= 2:
    half = step // 2
    # Diamond step: the middle of a square is the mean of its corners.
    corners = cloud[::step, ::step]
    total = corners + np.roll(corners, -1, 0)
    total = total + np.roll(total, -1, 1)
    noise = rng.uniform(-rough, rough, (3, *corners.shape))
    cloud[half::step, half::step] = total / 4 + noise[0]
    # Square step: the middle of an edge is the mean of its four neighbours.
    middles = cloud[half::step, half::step]
    along = middles + np.roll(middles, 1, 0)
    across = middles + np.roll(middles, 1, 1)
    cloud[::step, half::step] = (
      along + corners + np.roll(corners, -1, 1)
    ) / 4 + noise[1]
    cloud[half::step, ::step] = (
      across + corners + np.roll(corners, -1, 0)
    ) / 4 + noise[2]
    step, rough = half, rough / decay
  # Stretch the values to [0, 1].
  cloud -= cloud.min()
  return cloud / cloud.max()


@_register((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))
def fog(x: np.ndarray, rng: Rng, thick: float, decay: float) -> np.ndarray:
  """Adds a cloud in front of the image."""
  # Draw a square cloud, and cut it to the size of the image.
  height, width = x.shape[:2]
  size = 1 << (max(height, width) - 1).bit_length()
  cloud = plasma(size, decay, rng)[:height, :width, None]
  return (x + thick * cloud) * x.max() / (x.max() + thick)


@_register(0.05, 0.1, 0.15, 0.2, 0.3)
def brightness(x: np.ndarray, rng: Rng, added: float) -> np.ndarray:
  """Brightens the image; keeps hue and saturation."""
  # Raise the value of HSV, which is the maximum over the channels.
  top = x.max(-1, keepdims=True)
  bright = np.minimum(top + added, 1)
  return np.where(top > 0, x * bright / np.where(top > 0, top, 1), bright)


@_register(0.75, 0.5, 0.4, 0.3, 0.15)
def contrast(x: np.ndarray, rng: Rng, share: float) -> np.ndarray:
  """Moves all pixels towards the mean colour."""
  mean = x.mean((0, 1), keepdims=True)
  return share * (x - mean) + mean


@_register(
  (0.0, 0.0, 0.08),
  (0.05, 0.2, 0.07),
  (0.08, 0.06, 0.06),
  (0.1, 0.04, 0.05),
  (0.1, 0.03, 0.03),
)
def elastic_transform(
  x: np.ndarray, rng: Rng, strength: float, smooth: float, affine: float
) -> np.ndarray:
  """Applies a small random affine map, then a smooth random displacement."""
  side = min(x.shape[:2])
  # Draw an affine map by moving three corners of a square in the middle.
  height, width = x.shape[:2]
  middle = np.array([height, width]) // 2
  third = side // 3
  corners = middle + third * np.array([[1, 1], [1, -1], [-1, -1]])
  moved = corners + rng.uniform(-affine, affine, (3, 2)) * side
  # Solve for the affine map from the moved corners to the corners.
  back = np.linalg.solve(np.c_[moved, np.ones(3)], corners)
  grid = np.stack([*np.mgrid[:height, :width].astype(float)], -1)
  places = np.moveaxis(grid @ back[:2] + back[2], -1, 0)
  # Displace every place by a smooth random field.
  if strength:
    field = rng.uniform(-1, 1, (2, height, width))
    sigma = (0, smooth * side, smooth * side)
    places += (
      strength * side * ndimage.gaussian_filter(field, sigma, truncate=3)
    )
  return _sample(x, places, mode="reflect")


def _picture(x: np.ndarray) -> Image.Image:
  return Image.fromarray(np.round(x * 255).astype(np.uint8))


@_register(0.95, 0.9, 0.85, 0.75, 0.65)
def pixelate(x: np.ndarray, rng: Rng, share: float) -> np.ndarray:
  """Reduces the image, and enlarges it again."""
  height, width = x.shape[:2]
  small = _picture(x).resize(
    (int(width * share), int(height * share)), Image.Resampling.BOX
  )
  large = small.resize((width, height), Image.Resampling.NEAREST)
  return np.asarray(large) / 255.0


@_register(80, 65, 58, 50, 40)
def jpeg_compression(x: np.ndarray, rng: Rng, quality: int) -> np.ndarray:
  """Saves the image as a JPEG of low quality."""
  file = io.BytesIO()
  _picture(x).save(file, "JPEG", quality=quality)
  decoded = pictures.decode(file.getvalue(), UserError, formats=("JPEG",))
  return np.asarray(decoded) / 255.0
