"""The generator of Pathfinder's images.

Two snakes of `contour_length` paddles grow at the same time from tails that
are `seed_distance` apart, then shorter distractors where there is room; a disc
marks one end of one of the two, another the far end of the same snake (label
1) or of the other (label 0).

A paddle is drawn at antialias times the size and resampled, as is the region
around it that no other may enter. Both depend on its orientation alone, so
they are drawn once for every orientation (`Sprites`); what is left, the walk,
is compiled by Numba. Pixels are computed as in the original; its random numbers
are not, so images differ and their distribution does not
(`tests/data/generators/test_snakes.py` compares).

Source: see `pathfinder`.
"""

from __future__ import annotations

import concurrent.futures
import functools
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
FREE = 76  # A mask up to 0.3 of 255 counts as free,
CROSSING = 459  # and one of 1.8 in sum as two paddles that cross.
GUESSES = 64  # At a free place, before all are listed.
ANTIALIAS = 2


class Sprites(NamedTuple):
  """Everything that depends on geometry and margin alone.

  Orientations 0 to 359 are those of first paddles, in degrees from -180, drawn
  from their tail; the k others lead to the k places that a next paddle can
  have its head at, drawn from the head back.

  paddle [360 + k, w, w] float32: brightness. region [360 + k, w, w] uint8: what
  it keeps clear, 255 for wholly, nothing outside box [360 + k, 4] (first and
  one past the last row, first and one past the last column). place [k, 2]: head
  relative to the pivot (y, x), and turn [k] its angle. room [360, m, 2]: pixels
  that must be free around a first paddle's tail, of which the first rooms [360]
  count, none for an orientation that is never taken. tails [360, t, 2]: places
  for the tail of the first snake, of which the first num_tails [360]
  count. near [o, 2]: the disc of radius margin. disc [v, v] float32: a marker.
  """

  paddle: np.ndarray
  region: np.ndarray
  box: np.ndarray
  place: np.ndarray
  turn: np.ndarray
  room: np.ndarray
  rooms: np.ndarray
  tails: np.ndarray
  num_tails: np.ndarray
  near: np.ndarray
  disc: np.ndarray


class Numbers(NamedTuple):
  """The settings of one image, for compiled code."""

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
  reach = int(radius)
  y, x = np.ogrid[-reach : reach + 1, -reach : reach + 1]
  return x**2 + y**2 <= radius**2


def _translate(y: float, x: float, angle: float, far: float) -> tuple[int, int]:
  return (
    math.ceil(y + far * math.sin(angle)),
    math.ceil(x + far * math.cos(angle)),
  )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
  """Compiles by Numba, and keeps the result where it can be kept."""
  try:
    return numba.njit(cache=True, nogil=True)(function)
  except RuntimeError:  # Neither the package's folder nor a home is writable.
    return numba.njit(nogil=True)(function)


_compiled_translate = compiled(_translate)


def _draw(
  geometry: Geometry, margin: int, angle: float
) -> tuple[np.ndarray, np.ndarray]:
  """A paddle from the middle of a square outwards, and what it keeps clear."""
  reach = geometry.paddle_length + math.ceil(geometry.thickness) + margin
  centre = reach * ANTIALIAS
  blown = Image.new("L", (2 * centre + 1, 2 * centre + 1))
  y, x = _translate(centre, centre, angle, geometry.paddle_length * ANTIALIAS)
  width = round(geometry.thickness * ANTIALIAS)
  ImageDraw.Draw(blown).line([(centre, centre), (x, y)], 255, width)
  line = np.asarray(blown)
  clear = ndimage.binary_dilation(line > 0, _disc(margin * ANTIALIAS))
  return _resize(line, 2 * reach + 1), _resize(clear * 255, 2 * reach + 1)


def _resize(blown: np.ndarray, side: int) -> np.ndarray:
  image = Image.fromarray(blown.astype(np.uint8))
  return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def _bounds(region: np.ndarray) -> np.ndarray:
  """First and one past the last row, then column, that are not zero."""
  rows, columns = (np.nonzero(region.any(axis))[0] for axis in (1, 0))
  return np.array([rows[0], rows[-1] + 1, columns[0], columns[-1] + 1])


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Lists of places of many lengths -> [count, longest, 2] and the lengths."""
  table = np.zeros((len(rows), max(map(len, rows)), 2), np.int64)
  for places, row in zip(table, rows, strict=True):
    places[: len(row)] = row
  return table, np.array([len(row) for row in rows])


def _reaches_every_corner(offsets: np.ndarray) -> bool:
  """Whether a first paddle can be placed at all.

  In a corner of the image, where every pixel of the room may lie outside, the
  original's dilation yields minus infinity, and then it finds no free place
  anywhere. That is most orientations at 32 pixels, and the reason why few
  distractors are drawn there.
  """
  return all(
    ((offsets * sign) >= 0).all(1).any()
    for sign in ((1, 1), (1, -1), (-1, 1), (-1, -1))
  )


@functools.cache
def sprites(resolution: int, margin: int) -> Sprites:
  """Draws everything that is drawn more than once; tenths of a second."""
  geometry = GEOMETRIES[resolution]
  degrees = np.deg2rad(np.arange(-180, 180))
  far = geometry.paddle_length + margin
  # Pixels on a circle around the pivot, none twice.
  around = np.deg2rad(np.arange(0, 360, 360 / (2 * far * np.pi)))
  circle = np.stack([far * np.sin(around), far * np.cos(around)], axis=1)
  place = np.unique(np.floor(circle).astype(np.int64), axis=0)
  turn = np.arctan2(place[:, 0], place[:, 1])
  back = np.where(turn < 0, turn + np.pi, turn - np.pi)
  drawn = [_draw(geometry, margin, a) for a in (*degrees, *back)]
  paddle = np.stack([one for one, _ in drawn]).astype(np.float32) / 255
  region = np.stack([two for _, two in drawn])
  # The original sets the structuring element one pixel off its centre.
  reach = region.shape[1] // 2
  room = []
  for one in region[:360]:
    y, x = np.nonzero(one == 255)
    shifted = np.stack([y, x], axis=1) - reach + 1
    shifted = shifted[(np.abs(shifted) <= far).all(1)]
    room.append(shifted if _reaches_every_corner(shifted) else shifted[:0])
  border = 2 * geometry.seed_distance
  pixels = np.argwhere(np.ones((resolution, resolution), bool))
  tails = []
  for offsets in room:
    touched = pixels[:, None] + offsets[None]
    free = (touched >= border) & (touched < resolution - border)
    tails.append(pixels[free.all((1, 2))][: len(pixels) * bool(len(offsets))])
  room_table, rooms = _padded(room)
  tail_table, num_tails = _padded(tails)
  near = np.argwhere(_disc(margin)) - margin
  v = math.ceil(geometry.marker_radius) + 3  # Lanczos reaches three pixels.
  side = (2 * v + 1) * ANTIALIAS
  y, x = np.ogrid[:side, :side]
  centre = v * ANTIALIAS
  blown = (y - centre) ** 2 + (x - centre) ** 2 <= (
    geometry.marker_radius * ANTIALIAS
  ) ** 2
  disc = _resize(blown * 255, 2 * v + 1).astype(np.float32) / 255
  return Sprites(
    paddle,
    region,
    np.stack([_bounds(one) for one in region]),
    place,
    turn,
    room_table,
    rooms,
    tail_table,
    num_tails,
    near,
    disc,
  )


@compiled
def _stamp(
  out: Any, sprite: Any, box: Any, y: int, x: int, scale: float
) -> None:
  """out = max(out, scale * sprite), centred at (y, x), cut at the border."""
  top, left = y - sprite.shape[0] // 2, x - sprite.shape[0] // 2
  size = out.shape[0]
  for i in range(max(box[0], -top), min(box[1], size - top)):
    for j in range(max(box[2], -left), min(box[3], size - left)):
      value = sprite[i, j] * scale
      if value > out[top + i, left + j]:
        out[top + i, left + j] = value


@compiled
def _crosses(mask: Any, region: Any, box: Any, y: int, x: int) -> bool:
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
def _extend(
  rng: Any, mask: Any, y: int, x: int, angle: float, s: Any, n: Any
) -> tuple[int, int, int]:
  """Chooses the next paddle of a snake.

  Args:
    rng: NumPy's generator.
    mask: uint8 [size, size], what is taken.
    y, x: pivot of the last paddle.
    angle: of the last paddle.
    s: `Sprites`.
    n: `Numbers`.

  Returns:
    (k, y, x): the k-th place, and the new pivot; k = -1 if there is none.
  """
  y, x = _compiled_translate(y, x, angle, float(n.length + 2 * n.margin))
  weights = np.zeros(len(s.turn))
  for k in range(len(s.turn)):
    at_y, at_x = y + s.place[k, 0], x + s.place[k, 1]
    if not _inside(at_y, at_x, n.size):
      continue
    delta = abs(s.turn[k] - angle)
    delta = min(delta, 2 * math.pi - delta) * n.continuity
    if delta >= math.pi / 2:
      continue
    taken = 0
    for o in range(len(s.near)):
      by, bx = at_y + s.near[o, 0], at_x + s.near[o, 1]
      if _inside(by, bx, n.size) and mask[by, bx] > taken:
        taken = mask[by, bx]
    weights[k] = math.cos(delta) ** 2 * (1 - taken / 255)
  total = weights.sum()
  if total < 1e-4:
    return -1, y, x
  for _ in range(PADDLE_TRIALS):
    left = rng.random() * total
    k = 0
    while k < len(weights) - 1 and left >= weights[k]:
      left -= weights[k]
      k += 1
    at_y, at_x = y + s.place[k, 0], x + s.place[k, 1]
    if not _crosses(mask, s.region[360 + k], s.box[360 + k], at_y, at_x):
      return k, y, x
  return -1, y, x


@compiled
def _pivot(y: int, x: int, degree: int, n: Any) -> tuple[bool, int, int, float]:
  """Where the first paddle of a snake, with its tail at (y, x), turns."""
  angle = (degree - 180) * math.pi / 180
  back = angle + math.pi if angle < 0 else angle - math.pi
  hy, hx = _compiled_translate(y, x, angle, float(n.length))
  py, px = _compiled_translate(hy, hx, back, float(n.length + n.margin))
  good = _inside(hy, hx, n.size) and _inside(py, px, n.size)
  return good, py, px, angle


@compiled
def _two_seeds(rng: Any, s: Any, n: Any, state: Any) -> bool:
  """Places the first paddle of both snakes.

  state: int64 [2, 5], for each the sprite, y and x of its last paddle, and y
  and x of its last pivot.
  """
  found = False
  for _ in range(PADDLE_TRIALS):
    degree = rng.integers(0, 360)
    if s.num_tails[degree] == 0:
      return False
    tail = s.tails[degree, rng.integers(0, s.num_tails[degree])]
    found, py, px, _angle = _pivot(tail[0], tail[1], degree, n)
    if found:
      state[0] = (degree, tail[0], tail[1], py, px)
      break
  if not found:
    return False
  for _ in range(PADDLE_TRIALS):
    degree = rng.integers(0, 360)
    direction = rng.integers(0, 360) * math.pi / 180
    y = round(state[0, 1] + n.seed_distance * math.sin(direction))
    x = round(state[0, 2] + n.seed_distance * math.cos(direction))
    found, py, px, _angle = _pivot(y, x, degree, n)
    if found:
      state[1] = (degree, y, x, py, px)
      return True
  return False


@compiled
def _angle_of(sprite: int, s: Any) -> float:
  if sprite < 360:
    return (sprite - 180) * math.pi / 180
  return s.turn[sprite - 360]


@compiled
def _grow(rng: Any, mask: Any, last: Any, s: Any, n: Any) -> bool:
  """Adds a paddle to the snake whose last one is `last`, a row of `state`."""
  angle = _angle_of(last[0], s)
  k, py, px = _extend(rng, mask, last[3], last[4], angle, s, n)
  if k < 0:
    return False
  _take(mask, last, s)
  last[0] = 360 + k
  last[1], last[2] = py + s.place[k, 0], px + s.place[k, 1]
  last[3], last[4] = py, px
  return True


@compiled
def _take(mask: Any, paddle: Any, s: Any) -> None:
  """Masks what a paddle (sprite, y, x, ...) keeps clear."""
  k = paddle[0]
  _stamp(mask, s.region[k], s.box[k], paddle[1], paddle[2], 1)


@compiled
def _paint(image: Any, paddles: Any, contrast: float, s: Any) -> None:
  """Draws a snake: paddles [m, 3], each (sprite, y, x)."""
  side = s.paddle.shape[1]
  box = np.array((0, side, 0, side))
  for k, y, x in paddles:
    _stamp(image, s.paddle[k], box, y, x, contrast)


@compiled
def _two_snakes(rng: Any, mask: Any, paddles: Any, s: Any, n: Any) -> bool:
  """Lays out both snakes, or fails half-way.

  paddles: int64 [2, contour, 3], (sprite, y, x) of each.
  """
  state = np.zeros((2, 5), np.int64)
  if not _two_seeds(rng, s, n, state):
    return False
  mask[:] = 255
  mask[n.padding : n.size - n.padding, n.padding : n.size - n.padding] = 0
  paddles[:, 0] = state[:, :3]
  for paddle in range(1, n.contour):
    for snake in range(2):
      if not _grow(rng, mask, state[snake], s, n):
        return False
      paddles[snake, paddle] = state[snake, :3]
  # Of the last two paddles the original keeps clear of the second alone.
  _take(mask, state[1], s)
  return True


@compiled
def _has_room(mask: Any, degree: int, y: int, x: int, s: Any) -> bool:
  """Whether a first paddle with its tail at (y, x) has its room to itself."""
  size = mask.shape[0]
  for o in range(s.rooms[degree]):
    by, bx = y + s.room[degree, o, 0], x + s.room[degree, o, 1]
    if _inside(by, bx, size):
      edge = by == 0 or bx == 0 or by == size - 1 or bx == size - 1
      if edge or mask[by, bx] > FREE:
        return False
  return True


@compiled
def _free_tail(
  rng: Any, mask: Any, degree: int, free: Any, s: Any
) -> tuple[int, int]:
  """One of the places where a first paddle has room, (-1, -1) if none has.

  All are equally likely. They are listed only if guessing does not find one.

  free: int64 [size * size, 2], room to list them in.
  """
  size = mask.shape[0]
  for _ in range(GUESSES):
    y, x = rng.integers(0, size), rng.integers(0, size)
    if _has_room(mask, degree, y, x, s):
      return y, x
  count = 0
  for y in range(size):
    for x in range(size):
      if _has_room(mask, degree, y, x, s):
        free[count, 0], free[count, 1] = y, x
        count += 1
  if count == 0:
    return -1, -1
  at = rng.integers(0, count)
  return free[at, 0], free[at, 1]


@compiled
def _seed(rng: Any, mask: Any, free: Any, s: Any, n: Any, last: Any) -> bool:
  """Chooses the first paddle of a distractor where there is room for it."""
  if (mask <= FREE).sum() < LEAST_ROOM * mask.size:
    return False
  for _ in range(PADDLE_TRIALS):
    degree = rng.integers(0, 360)
    if s.rooms[degree] == 0:
      return False
    y, x = _free_tail(rng, mask, degree, free, s)
    if y < 0:
      return False
    found, py, px, _angle = _pivot(y, x, degree, n)
    if found:
      last[0], last[1], last[2], last[3], last[4] = degree, y, x, py, px
      return True
  return False


@compiled
def _distractors(rng: Any, image: Any, mask: Any, s: Any, n: Any) -> int:
  """Draws as many distractors as find room; returns their number."""
  free = np.empty((n.size * n.size, 2), np.int64)
  last = np.zeros(5, np.int64)
  paddles = np.zeros((n.distractor_length, 3), np.int64)
  drawn = 0
  for _ in range(n.distractors):
    for _ in range(SNAKE_TRIALS):
      if not _seed(rng, mask, free, s, n, last):
        continue
      taken = mask.copy()
      paddles[0] = last[:3]
      whole = True
      for paddle in range(1, n.distractor_length):
        if not _grow(rng, taken, last, s, n):
          whole = False
          break
        paddles[paddle] = last[:3]
      if whole:
        _take(taken, last, s)
        mask[:] = taken
        _paint(image, paddles, n.distractor, s)
        drawn += 1
        break
  return drawn


@compiled
def _image(rng: Any, s: Any, n: Any) -> Any:
  """The fields of a `Sample` without its margin."""
  label = rng.integers(0, 2)
  image = np.zeros((n.size, n.size), np.float32)
  mask = np.zeros((n.size, n.size), np.uint8)
  paddles = np.zeros((2, n.contour, 3), np.int64)
  restarts = 0
  while not _two_snakes(rng, mask, paddles, s, n):
    restarts += 1
  for snake in range(2):
    _paint(image, paddles[snake], n.target, s)
  drawn = _distractors(rng, image, mask, s, n)
  path = paddles[:, :, 1:].copy()
  marked = rng.integers(0, 2)
  other = marked if label == 1 else 1 - marked
  side = s.disc.shape[0]
  box = np.array((0, side, 0, side))
  _stamp(image, s.disc, box, path[marked, 0, 0], path[marked, 0, 1], 1.0)
  _stamp(image, s.disc, box, path[other, -1, 0], path[other, -1, 1], 1.0)
  low, high = image.min(), image.max()
  pixels = np.empty((n.size, n.size), np.uint8)
  for y in range(n.size):
    for x in range(n.size):
      pixels[y, x] = int((image[y, x] - low) * (255.0 / (high - low)) + 0.5)
  return pixels, label, path, marked, drawn, restarts


class Sample(NamedTuple):
  """One image and how it came about.

  pixels uint8 [size, size]. label 1 if the discs lie on the same snake. path
  int64 [2, contour_length, 2], places (y, x) of the two snakes' paddles.
  marked: whose tail has a disc. distractors: number drawn. restarts: attempts
  at the two snakes that failed. margin: between paddles.
  """

  pixels: np.ndarray
  label: int
  path: np.ndarray
  marked: int
  distractors: int
  restarts: int
  margin: int

  def discs(self) -> np.ndarray:
    """(y, x) of the two discs, int64 [2, 2]."""
    other = self.marked if self.label else 1 - self.marked
    return np.stack([self.path[self.marked, 0], self.path[other, -1]])


def sample(settings: Settings, index: int) -> Sample:
  """The image of an index: a function of it and of the settings alone."""
  geometry = GEOMETRIES[settings.resolution]
  contour = DIFFICULTIES[settings.difficulty]
  entropy = [settings.seed, settings.resolution, contour, index]
  rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
  margin = geometry.margins[int(rng.integers(0, len(geometry.margins)))]
  count, length = distractor_counts(settings.resolution, settings.difficulty)
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
  return Sample(*drawn, margin)


def chunk(settings: Settings, start: int) -> tuple[np.ndarray, np.ndarray]:
  """The images from `start` on, at most CHUNK.

  Returns:
    pixels uint8 [k, size, size] and labels uint8 [k].
  """
  indices = range(start, min(start + CHUNK, settings.num_images))
  made = [sample(settings, index) for index in indices]
  pixels = np.stack([one.pixels for one in made])
  return pixels, np.array([one.label for one in made], np.uint8)


def chunks(settings: Settings, starts: list[int]) -> Iterator[tuple[int, Any]]:
  """(start, chunk) as they get done, made on all cores at once."""
  workers = os.cpu_count() or 1
  pool = concurrent.futures.ThreadPoolExecutor(workers)
  try:
    jobs = {pool.submit(chunk, settings, start): start for start in starts}
    for job in concurrent.futures.as_completed(jobs):
      yield jobs.pop(job), job.result()
  finally:  # Whoever asked may be gone: what was not begun is left.
    pool.shutdown(cancel_futures=True)
