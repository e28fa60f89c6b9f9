"""Generates the images of Pathfinder.

Two snakes of `contour` paddles grow in turn from tails that are `seed_distance`
apart. Then shorter distractors are added where there is room. One disc marks
the tail of one snake. Another disc marks the far end of the same snake (label
1) or of the other snake (label 0).

A paddle, and the region around it that no other paddle may enter, are drawn at
`ANTIALIAS` times their size and resampled. Both depend only on the orientation,
so they are drawn once for every orientation (`Sprites`). Numba compiles the
random walk that places them. Pixels are computed as in the original generator,
but from other random numbers: the images differ, but not their distribution
(`tests/data/generators/test_snakes.py` compares the two).

The steps of an image, each a function below:

1. `_two_snakes` places both first paddles (`_two_seeds`) and lets the snakes
   grow in turn (`_grow`).
2. `_distractors` places shorter snakes where there is room.
3. `_image` paints all snakes and the two discs, and scales to 0 to 255.

Arguments of the compiled functions:

- `mask`, uint8 [size, size]: how far a pixel is taken, 255 for entirely taken.
- `image`, float32 [size, size]: brightness.
- `sprites` and `numbers`: see `Sprites` and `Numbers`.
- `last`, int64 [5]: latest paddle of a snake. Its entries are the number of the
  sprite, (y, x) of the end from which the sprite is drawn, and (y, x) of the
  pivot around which the next paddle turns.

Source: see `pathfinder`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from jaxformers.data.generators.pathfinder import (
  CHUNK,
  DIFFICULTIES,
  GEOMETRIES,
  Geometry,
  Settings,
  distractor_counts,
)

PADDLE_TRIALS = 3  # Candidates for the next paddle before a snake fails.
SNAKE_TRIALS = 5  # Attempts at each distractor.
LEAST_ROOM = 0.01  # Share of free pixels below which no distractor is tried.
FREE = 76  # A pixel is free up to this mask value, 0.3 * 255.
CROSSING = 459  # Paddles cross if two mask values add up to this, 1.8 * 255.
GUESSES = 64  # Random places that are tried before all free ones are listed.
ANTIALIAS = 2  # Enlargement at which paddles and discs are drawn.


class Sprites(NamedTuple):
  """Drawn paddles and tables that depend only on resolution and margin.

  Sprites 0 to 359 are first paddles with directions from -180 to 179 degrees,
  drawn from the tail. The k other sprites are next paddles, one for each of the
  k possible places of their head, drawn from the head backwards.

  Attributes:
    paddle: brightness of each paddle, float32 [360 + k, w, w].
    region: pixels that each paddle keeps clear, uint8 [360 + k, w, w]; 255 for
      entirely, zero outside of its box.
    box: bounds of each region, int64 [360 + k, 4]: first row, last row + 1,
      first column, last column + 1.
    place: (y, x) of each head relative to the pivot, int64 [k, 2].
    angle: direction of each paddle, float64 [360 + k].
    room: pixels around the tail of a first paddle that must be free, int64
      [360, m, 2]; the first `rooms` of the m are valid.
    rooms: number of valid pixels, int64 [360]; 0 for an orientation that is
      never taken.
    tails: possible tails of the first snake, int64 [360, t, 2]; the first
      `num_tails` of the t are valid.
    num_tails: number of valid tails, int64 [360].
    near: offsets within a disc whose radius is the margin, int64 [o, 2].
    disc: brightness of a marker, float32 [v, v].
  """

  paddle: np.ndarray
  region: np.ndarray
  box: np.ndarray
  place: np.ndarray
  angle: np.ndarray
  room: np.ndarray
  rooms: np.ndarray
  tails: np.ndarray
  num_tails: np.ndarray
  near: np.ndarray
  disc: np.ndarray


class Numbers(NamedTuple):
  """Settings of one image, for compiled code.

  Attributes:
    size: pixels per side.
    padding: width of the border that snakes do not enter.
    margin: number of free pixels around a paddle.
    length: length of a paddle.
    seed_distance: distance between the tails of the two snakes.
    continuity: weight of the direction; larger values make straighter snakes.
    contour: number of paddles of a target snake.
    distractors: largest number of distractors.
    distractor_length: number of paddles of a distractor.
    target, distractor: contrast of the paddles of target snakes and of
      distractors.
  """

  size: int
  padding: int
  margin: int
  length: int
  seed_distance: int
  continuity: float
  contour: int
  distractors: int
  distractor_length: int
  target: float
  distractor: float


def _disc(radius: float) -> np.ndarray:
  """Returns a filled disc, bool [2 radius + 1, 2 radius + 1]."""
  reach = int(radius)
  y, x = np.ogrid[-reach : reach + 1, -reach : reach + 1]
  return x**2 + y**2 <= radius**2


def _translate(y: float, x: float, angle: float, far: float) -> tuple[int, int]:
  """Returns the pixel at the distance `far` in the direction of an angle."""
  return (
    math.ceil(y + far * math.sin(angle)),
    math.ceil(x + far * math.cos(angle)),
  )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
  """Compiles a function with Numba, and caches the code on disk if possible."""
  try:
    return numba.njit(cache=True, nogil=True)(function)
  except RuntimeError:  # No folder for the cache can be written.
    return numba.njit(nogil=True)(function)


_compiled_translate = compiled(_translate)


def _draw(
  geometry: Geometry, margin: int, angle: float
) -> tuple[np.ndarray, np.ndarray]:
  """Draws a paddle from the middle of a square outwards, and its region.

  Args:
    geometry: sizes of the resolution.
    margin: number of free pixels around a paddle.
    angle: direction of the paddle.

  Returns:
    The paddle, and the region that it keeps clear, both uint8 [w, w].
  """
  # Draw the enlarged line in a square that is large enough for all directions.
  reach = geometry.paddle_length + math.ceil(geometry.thickness) + margin
  centre = reach * ANTIALIAS
  blown = Image.new("L", (2 * centre + 1, 2 * centre + 1))
  y, x = _translate(centre, centre, angle, geometry.paddle_length * ANTIALIAS)
  width = round(geometry.thickness * ANTIALIAS)
  ImageDraw.Draw(blown).line([(centre, centre), (x, y)], 255, width)
  line = np.asarray(blown)
  # Dilate the line by the margin to get its region.
  clear = ndimage.binary_dilation(line > 0, _disc(margin * ANTIALIAS))
  # Reduce both to their final size.
  return _resize(line, 2 * reach + 1), _resize(clear * 255, 2 * reach + 1)


def _resize(blown: np.ndarray, side: int) -> np.ndarray:
  """Resamples to side x side pixels with the original's Lanczos filter."""
  image = Image.fromarray(blown.astype(np.uint8))
  return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def _bounds(region: np.ndarray) -> np.ndarray:
  """Returns the box of all nonzero pixels; see `Sprites.box`."""
  rows, columns = (np.nonzero(region.any(axis))[0] for axis in (1, 0))
  return np.array([rows[0], rows[-1] + 1, columns[0], columns[-1] + 1])


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Pads lists of places to one array.

  Args:
    rows: places (y, x) of each list, int64 [length, 2].

  Returns:
    The places, int64 [count, longest, 2], and the lengths of the lists [count].
  """
  table = np.zeros((len(rows), max(map(len, rows)), 2), np.int64)
  for places, row in zip(table, rows, strict=True):
    places[: len(row)] = row
  return table, np.array([len(row) for row in rows])


def _rooms(regions: np.ndarray, far: int) -> list[np.ndarray]:
  """Returns the pixels that must be free around the tail of a first paddle.

  For some orientations, all pixels of a room can lie outside of the image if
  the tail is in a corner. There the original's dilation yields minus infinity,
  and the original then finds no free place for the orientation. This function
  excludes these orientations too: at 32 pixels they are the majority, so only
  few distractors are drawn.

  Args:
    regions: pixels that first paddles keep clear, uint8 [360, w, w].
    far: largest offset to include.

  Returns:
    The offsets for each orientation, int64 [m, 2]; empty for an orientation
    that is never taken.
  """
  # Use the original's centre of the structuring element, one pixel off.
  centre = regions.shape[1] // 2 - 1
  rooms = []
  for region in regions:
    # Take the pixels that the paddle keeps entirely clear.
    offsets = np.argwhere(region == 255) - centre
    offsets = offsets[(np.abs(offsets) <= far).all(1)]
    # Exclude orientations whose room has no pixel towards one of the corners.
    sides = itertools.product((1, -1), repeat=2)
    is_taken = all((offsets * side >= 0).all(1).any() for side in sides)
    rooms.append(offsets if is_taken else offsets[:0])
  return rooms


def _tails(rooms: list[np.ndarray], size: int, border: int) -> list[np.ndarray]:
  """Returns the possible tails of the first snake for each orientation.

  Args:
    rooms: result of `_rooms`.
    size: pixels per side.
    border: width of the border that the room of a tail must not touch.
  """
  # Keep the pixels whose whole room lies within the border.
  pixels = np.argwhere(np.ones((size, size), bool))
  tails = []
  for offsets in rooms:
    touched = pixels[:, None] + offsets[None]
    is_inside = (touched >= border) & (touched < size - border)
    places = pixels[is_inside.all((1, 2))]
    tails.append(places if len(offsets) else places[:0])
  return tails


def _marker(radius: float) -> np.ndarray:
  """Draws the disc that marks an end of a snake, float32 [v, v]."""
  reach = math.ceil(radius) + 3  # The Lanczos filter reaches three pixels.
  side = (2 * reach + 1) * ANTIALIAS
  y, x = np.ogrid[:side, :side]
  centre = reach * ANTIALIAS
  blown = (y - centre) ** 2 + (x - centre) ** 2 <= (radius * ANTIALIAS) ** 2
  return _resize(blown * 255, 2 * reach + 1).astype(np.float32) / 255


@functools.cache
def sprites(resolution: int, margin: int) -> Sprites:
  """Draws the sprites of a resolution and margin, in tenths of a second."""
  geometry = GEOMETRIES[resolution]
  far = geometry.paddle_length + margin
  # List the distinct pixels on a circle around the pivot.
  around = np.deg2rad(np.arange(0, 360, 360 / (2 * far * np.pi)))
  circle = np.stack([far * np.sin(around), far * np.cos(around)], axis=1)
  place = np.unique(np.floor(circle).astype(np.int64), axis=0)
  turn = np.arctan2(place[:, 0], place[:, 1])
  # Draw first paddles from the tail, and next paddles from the head backwards.
  degrees = np.arange(-180, 180)
  back = np.where(turn < 0, turn + np.pi, turn - np.pi)
  angles = (*np.deg2rad(degrees), *back)
  drawn = [_draw(geometry, margin, angle) for angle in angles]
  paddles, regions = (np.stack(images) for images in zip(*drawn, strict=True))
  # List the possible places of first paddles.
  rooms = _rooms(regions[:360], far)
  room, num_rooms = _padded(rooms)
  tail, num_tails = _padded(
    _tails(rooms, resolution, 2 * geometry.seed_distance)
  )
  # Keep the box of each region: outside of the box all pixels are zero.
  return Sprites(
    paddle=paddles.astype(np.float32) / 255,
    region=regions,
    box=np.stack([_bounds(region) for region in regions]),
    place=place,
    angle=np.concatenate([degrees * np.pi / 180, turn]),
    room=room,
    rooms=num_rooms,
    tails=tail,
    num_tails=num_tails,
    near=np.argwhere(_disc(margin)) - margin,
    disc=_marker(geometry.marker_radius),
  )


@compiled
def _stamp(
  out: Any, sprite: Any, box: Any, y: int, x: int, scale: float
) -> None:
  """Sets out = max(out, scale * sprite), with the sprite centred at (y, x).

  Args:
    out: image or mask, changed in place; the sprite is cut at its border.
    sprite: pixels of the sprite, [w, w].
    box: bounds of the nonzero part of the sprite; see `Sprites.box`.
    y, x: place of the centre of the sprite.
    scale: factor of the sprite.
  """
  # Visit the part of the box that lies inside of the image.
  top, left = y - sprite.shape[0] // 2, x - sprite.shape[0] // 2
  size = out.shape[0]
  for i in range(max(box[0], -top), min(box[1], size - top)):
    for j in range(max(box[2], -left), min(box[3], size - left)):
      value = sprite[i, j] * scale
      if value > out[top + i, left + j]:
        out[top + i, left + j] = value


@compiled
def _crosses(mask: Any, region: Any, box: Any, y: int, x: int) -> bool:
  """Returns True if a region centred at (y, x) overlaps the mask."""
  # Visit the part of the box that lies inside of the image.
  top, left = y - region.shape[0] // 2, x - region.shape[0] // 2
  size = mask.shape[0]
  for i in range(max(box[0], -top), min(box[1], size - top)):
    for j in range(max(box[2], -left), min(box[3], size - left)):
      if region[i, j] + np.int64(mask[top + i, left + j]) >= CROSSING:
        return True
  return False


@compiled
def _inside(y: int, x: int, size: int) -> bool:
  return 0 <= y < size and 0 <= x < size


@compiled
def _weigh_turns(
  mask: Any, y: int, x: int, angle: float, sprites: Any, numbers: Any
) -> Any:
  """Returns the weight of every possible place of the next head, float64 [k].

  The weight is cos(delta)^2 * (1 - taken / 255). `delta` is the change of the
  direction times `continuity`; `taken` is the largest mask value around the
  place. The weight is zero for a delta of a right angle or more, and for places
  outside of the image.
  """
  size = numbers.size
  weights = np.zeros(len(sprites.place))
  for k in range(len(sprites.place)):
    head_y, head_x = y + sprites.place[k, 0], x + sprites.place[k, 1]
    if not _inside(head_y, head_x, size):
      continue
    # Compute delta, the weighted change of the direction.
    delta = abs(sprites.angle[360 + k] - angle)
    delta = min(delta, 2 * math.pi - delta) * numbers.continuity
    if delta >= math.pi / 2:
      continue
    # Find the largest mask value near the head.
    taken = 0
    for o in range(len(sprites.near)):
      by, bx = head_y + sprites.near[o, 0], head_x + sprites.near[o, 1]
      if _inside(by, bx, size) and mask[by, bx] > taken:
        taken = mask[by, bx]
    weights[k] = math.cos(delta) ** 2 * (1 - taken / 255)
  return weights


@compiled
def _grow(rng: Any, mask: Any, last: Any, sprites: Any, numbers: Any) -> bool:
  """Adds a paddle to a snake and updates `last`; returns False if it fails.

  Args:
    rng: NumPy's generator.
    mask: mask of the taken pixels; the previous paddle is added to it.
    last: latest paddle of the snake.
    sprites: see `Sprites`.
    numbers: see `Numbers`.
  """
  # Move the pivot by the length of a paddle and two margins.
  far = float(numbers.length + 2 * numbers.margin)
  angle = sprites.angle[last[0]]
  y, x = _compiled_translate(last[3], last[4], angle, far)
  # Fail if no place ahead is free.
  weights = _weigh_turns(mask, y, x, angle, sprites, numbers)
  total = weights.sum()
  if total < 1e-4:
    return False
  for _ in range(PADDLE_TRIALS):
    # Draw a place with probability weights / total.
    left = rng.random() * total
    k = 0
    while k < len(weights) - 1 and left >= weights[k]:
      left -= weights[k]
      k += 1
    # Accept the place unless its paddle crosses another one.
    head_y, head_x = y + sprites.place[k, 0], x + sprites.place[k, 1]
    region, box = sprites.region[360 + k], sprites.box[360 + k]
    if not _crosses(mask, region, box, head_y, head_x):
      # Mask the previous paddle only now: the new one begins in its region.
      _take(mask, last, sprites)
      last[:] = (360 + k, head_y, head_x, y, x)
      return True
  return False


@compiled
def _begin(last: Any, y: int, x: int, degree: int, numbers: Any) -> bool:
  """Writes a first paddle with its tail at (y, x) into `last`.

  Returns False, and writes nothing, if head or pivot lie outside of the image.
  """
  # Go from the tail to the head, then back by a paddle and a margin.
  angle = (degree - 180) * math.pi / 180
  back = angle + math.pi if angle < 0 else angle - math.pi
  head_y, head_x = _compiled_translate(y, x, angle, float(numbers.length))
  far = float(numbers.length + numbers.margin)
  pivot_y, pivot_x = _compiled_translate(head_y, head_x, back, far)
  if not _inside(head_y, head_x, numbers.size):
    return False
  if not _inside(pivot_y, pivot_x, numbers.size):
    return False
  last[:] = (degree, y, x, pivot_y, pivot_x)
  return True


@compiled
def _two_seeds(rng: Any, sprites: Any, numbers: Any, state: Any) -> bool:
  """Places the first paddle of both snakes; returns False if it fails.

  Args:
    rng: NumPy's generator.
    sprites: see `Sprites`.
    numbers: see `Numbers`.
    state: output, int64 [2, 5]: `last` of each snake.
  """
  # Place the first snake at a random tail that has room.
  for _ in range(PADDLE_TRIALS):
    degree = rng.integers(0, 360)
    if sprites.num_tails[degree] == 0:
      return False
    y, x = sprites.tails[degree, rng.integers(0, sprites.num_tails[degree])]
    if _begin(state[0], y, x, degree, numbers):
      break
  else:
    return False
  # Place the second snake in a random direction from the first one.
  for _ in range(PADDLE_TRIALS):
    degree = rng.integers(0, 360)
    direction = rng.integers(0, 360) * math.pi / 180
    y = round(state[0, 1] + numbers.seed_distance * math.sin(direction))
    x = round(state[0, 2] + numbers.seed_distance * math.cos(direction))
    if _begin(state[1], y, x, degree, numbers):
      return True
  return False


@compiled
def _take(mask: Any, paddle: Any, sprites: Any) -> None:
  """Adds the region of a paddle (sprite, y, x, ...) to the mask."""
  k = paddle[0]
  _stamp(mask, sprites.region[k], sprites.box[k], paddle[1], paddle[2], 1)


@compiled
def _paint(image: Any, paddles: Any, contrast: float, sprites: Any) -> None:
  """Draws a snake: paddles [m, 3], each (sprite, y, x)."""
  for k, y, x in paddles:
    _stamp(image, sprites.paddle[k], sprites.box[k], y, x, contrast)


@compiled
def _two_snakes(
  rng: Any, mask: Any, paddles: Any, sprites: Any, numbers: Any
) -> bool:
  """Places both snakes; returns False if one of them cannot grow.

  Args:
    rng: NumPy's generator.
    mask: output: the pixels that the snakes keep clear.
    paddles: output, int64 [2, contour, 3]: (sprite, y, x) of each paddle.
    sprites: see `Sprites`.
    numbers: see `Numbers`.
  """
  state = np.zeros((2, 5), np.int64)
  if not _two_seeds(rng, sprites, numbers, state):
    return False
  # Mask the border.
  inner = slice(numbers.padding, numbers.size - numbers.padding)
  mask[:] = 255
  mask[inner, inner] = 0
  # Let both snakes grow in turn.
  paddles[:, 0] = state[:, :3]
  for paddle in range(1, numbers.contour):
    for snake in range(2):
      if not _grow(rng, mask, state[snake], sprites, numbers):
        return False
      paddles[snake, paddle] = state[snake, :3]
  # Mask the last paddle of the second snake only, as the original does.
  _take(mask, state[1], sprites)
  return True


@compiled
def _has_room(mask: Any, degree: int, y: int, x: int, sprites: Any) -> bool:
  """Returns True if a first paddle with its tail at (y, x) has free room."""
  # Check the pixels of the room: they must be free and not on the image's edge.
  size = mask.shape[0]
  for o in range(sprites.rooms[degree]):
    by = y + sprites.room[degree, o, 0]
    bx = x + sprites.room[degree, o, 1]
    if _inside(by, bx, size):
      is_edge = by == 0 or bx == 0 or by == size - 1 or bx == size - 1
      if is_edge or mask[by, bx] > FREE:
        return False
  return True


@compiled
def _free_tail(
  rng: Any, mask: Any, degree: int, sprites: Any
) -> tuple[int, int]:
  """Returns a random place where a first paddle has room, or else (-1, -1).

  All free places are equally likely.

  Args:
    rng: NumPy's generator.
    mask: mask of the taken pixels.
    degree: orientation of the paddle.
    sprites: see `Sprites`.
  """
  size = mask.shape[0]
  # Guess first, which is cheap if many places are free.
  for _ in range(GUESSES):
    y, x = rng.integers(0, size), rng.integers(0, size)
    if _has_room(mask, degree, y, x, sprites):
      return y, x
  # If no guess succeeds, list all free places, and draw one.
  free = np.empty((size * size, 2), np.int64)
  count = 0
  for y in range(size):
    for x in range(size):
      if _has_room(mask, degree, y, x, sprites):
        free[count, 0], free[count, 1] = y, x
        count += 1
  if count == 0:
    return -1, -1
  at = rng.integers(0, count)
  return free[at, 0], free[at, 1]


@compiled
def _seed(rng: Any, mask: Any, sprites: Any, numbers: Any, last: Any) -> bool:
  """Places the first paddle of a distractor; returns False if none fits."""
  # Give up if hardly any pixel is free.
  if (mask <= FREE).sum() < LEAST_ROOM * mask.size:
    return False
  for _ in range(PADDLE_TRIALS):
    degree = rng.integers(0, 360)
    if sprites.rooms[degree] == 0:
      return False
    # Draw a tail, and keep it if head and pivot lie in the image.
    y, x = _free_tail(rng, mask, degree, sprites)
    if y < 0:
      return False
    if _begin(last, y, x, degree, numbers):
      return True
  return False


@compiled
def _distractors(
  rng: Any, image: Any, mask: Any, sprites: Any, numbers: Any
) -> int:
  """Draws the distractors for which there is room; returns their number."""
  last = np.zeros(5, np.int64)
  paddles = np.zeros((numbers.distractor_length, 3), np.int64)
  drawn = 0
  for _ in range(numbers.distractors):
    for _ in range(SNAKE_TRIALS):
      if not _seed(rng, mask, sprites, numbers, last):
        continue
      # Grow on a copy of the mask, because an attempt may fail half-way.
      taken = mask.copy()
      paddles[0] = last[:3]
      for paddle in range(1, numbers.distractor_length):
        if not _grow(rng, taken, last, sprites, numbers):
          break
        paddles[paddle] = last[:3]
      else:
        # Success: keep the mask, and paint the paddles.
        _take(taken, last, sprites)
        mask[:] = taken
        _paint(image, paddles, numbers.distractor, sprites)
        drawn += 1
        break
  return drawn


@compiled
def _image(rng: Any, sprites: Any, numbers: Any) -> Any:
  """Returns the fields of a `Sample`, except the margin."""
  label = rng.integers(0, 2)
  image = np.zeros((numbers.size, numbers.size), np.float32)
  mask = np.zeros((numbers.size, numbers.size), np.uint8)
  # Place both snakes; start again until an attempt succeeds.
  paddles = np.zeros((2, numbers.contour, 3), np.int64)
  restarts = 0
  while not _two_snakes(rng, mask, paddles, sprites, numbers):
    restarts += 1
  # Paint the snakes and the distractors.
  for snake in range(2):
    _paint(image, paddles[snake], numbers.target, sprites)
  drawn = _distractors(rng, image, mask, sprites, numbers)
  # Mark a tail, and the far end of the same snake or of the other one.
  path = paddles[:, :, 1:].copy()
  marked = rng.integers(0, 2)
  other = marked if label == 1 else 1 - marked
  side = sprites.disc.shape[0]
  box = np.array((0, side, 0, side))
  for end in (path[marked, 0], path[other, -1]):
    _stamp(image, sprites.disc, box, end[0], end[1], 1.0)
  # Scale the brightness to 0 to 255.
  low, high = image.min(), image.max()
  pixels = (image - low) * (255.0 / (high - low)) + 0.5
  return pixels.astype(np.uint8), label, path, marked, drawn, restarts


class Sample(NamedTuple):
  """One image, with a record of its generation.

  Attributes:
    pixels: grey pixels, uint8 [size, size].
    label: 1 if the discs lie on the same snake, else 0.
    path: places (y, x) of the two snakes' paddles, int64 [2, contour, 2].
    marked: number of the snake whose tail has a disc.
    distractors: number of drawn distractors.
    restarts: number of failed attempts at the two snakes.
    margin: number of free pixels around a paddle.
  """

  pixels: np.ndarray
  label: int
  path: np.ndarray
  marked: int
  distractors: int
  restarts: int
  margin: int

  def discs(self) -> np.ndarray:
    """Returns the places (y, x) of the two discs, int64 [2, 2]."""
    other = self.marked if self.label else 1 - self.marked
    return np.stack([self.path[self.marked, 0], self.path[other, -1]])


def sample(settings: Settings, index: int) -> Sample:
  """Returns image `index`, a pure function of the index and the settings."""
  # Seed a generator from everything that the image depends on.
  geometry = GEOMETRIES[settings.resolution]
  contour = DIFFICULTIES[settings.difficulty]
  entropy = [settings.seed, settings.resolution, contour, index]
  rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
  # Draw the margin first: the sprites depend on it.
  margin = geometry.margins[int(rng.integers(0, len(geometry.margins)))]
  count, length = distractor_counts(settings.resolution, settings.difficulty)
  # Pass the settings as plain numbers, which Numba can compile.
  numbers = Numbers(
    size=settings.resolution,
    padding=geometry.padding,
    margin=margin,
    length=geometry.paddle_length,
    seed_distance=geometry.seed_distance,
    continuity=float(geometry.continuity),
    contour=contour,
    distractors=count,
    distractor_length=length,
    target=float(geometry.target),
    distractor=float(geometry.distractor),
  )
  drawn = _image(rng, sprites(settings.resolution, margin), numbers)
  return Sample._make((*drawn, margin))


def chunk(settings: Settings, start: int) -> tuple[np.ndarray, np.ndarray]:
  """Generates the images from `start` on, at most `CHUNK` of them.

  Args:
    settings: settings of the data set.
    start: index of the first image.

  Returns:
    pixels uint8 [k, size, size] and labels uint8 [k].
  """
  indices = range(start, min(start + CHUNK, settings.num_images))
  samples = [sample(settings, index) for index in indices]
  pixels = np.stack([drawn.pixels for drawn in samples])
  return pixels, np.array([drawn.label for drawn in samples], np.uint8)


def chunks(settings: Settings, starts: list[int]) -> Iterator[tuple[int, Any]]:
  """Generates chunks on all cores; yields (start, chunk) of each when ready."""
  # Use threads: compiled code does not hold the interpreter's lock.
  pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
  try:
    jobs = {pool.submit(chunk, settings, start): start for start in starts}
    for job in concurrent.futures.as_completed(jobs):
      yield jobs.pop(job), job.result()
  finally:
    # Start no more chunks if the caller has stopped early.
    pool.shutdown(cancel_futures=True)
