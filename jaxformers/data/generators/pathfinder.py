"""Settings of Pathfinder: do two discs lie on the same dashed snake?

The generator is in the module `snakes`: it imports Numba, which takes half a
second, and most runs read existing images.

Source: Linsley et al. 2018, https://arxiv.org/abs/1805.08315, and their
generator (github.com/drewlinsley/pathfinder, snakes.py and snakes2.py) with the
settings that LRA documents.
"""

from __future__ import annotations

import dataclasses

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

# Number of paddles of a target snake, by the names of LRA's levels.
LEVELS = {"easy": 6, "intermediate": 9, "hard": 14}
# And by other difficulties, which are numbers of paddles as text.
DIFFICULTIES = LEVELS | {
  str(number): number for number in {*range(2, 14)} - {*LEVELS.values()}
}
CHUNK = 1_000  # Number of images that are generated and saved together.


@dataclasses.dataclass(frozen=True)
class Geometry:
  """LRA's sizes for one resolution; all lengths are in pixels.

  Attributes:
    padding: width of the border that snakes do not enter.
    margins: choices of the free space around a paddle; one is drawn per image.
    paddle_length, thickness: size of a paddle.
    marker_radius: radius of a disc.
    seed_distance: distance between the tails of the two snakes.
    continuity: weight of the direction; larger values make straighter snakes.
    distractor_paddles: total number of paddles of all distractors, before
      rounding.
    target, distractor: contrast of the paddles of target snakes and of
      distractors; a disc has contrast 1.
  """

  padding: int
  margins: tuple[int, ...]
  paddle_length: int
  thickness: float
  marker_radius: float
  seed_distance: int
  continuity: float
  distractor_paddles: int
  target: float
  distractor: float


GEOMETRIES = {
  32: Geometry(1, (1,), 2, 0.5, 1.5, 7, 1.0, 20, 1.5, 2.0),
  64: Geometry(1, (1,), 5, 1, 2.5, 12, 1.8, 22, 0.8, 0.8),
  128: Geometry(1, (2, 3), 5, 1.5, 3, 20, 1.8, 35, 0.9, 0.9),
  256: Geometry(22, (3,), 5, 2, 5, 27, 1.8, 30, 1.0, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of a data set.

  Attributes:
    resolution: pixels per side: 32, 64, 128 or 256.
    difficulty: "easy", "intermediate" or "hard", or another number of paddles
      of a target snake as text, such as "4".
    num_images: number of images; 200,000 in LRA.
    seed: seed of the whole data set; image i depends on i and on all settings
      except num_images.
  """

  resolution: int = 32
  difficulty: str = "hard"
  num_images: int = 200_000
  seed: int = 0

  def __post_init__(self) -> None:
    """Raises UserError for values out of range."""
    choose("difficulty", self.difficulty, DIFFICULTIES)
    if self.resolution not in GEOMETRIES:
      raise UserError(
        f"resolution={self.resolution}: choose one of {tuple(GEOMETRIES)}."
      )
    if self.num_images < 10:
      raise UserError(
        f"num_images={self.num_images}: choose at least 10, for three splits."
      )


def distractor_counts(resolution: int, difficulty: str) -> tuple[int, int]:
  """Returns the number of distractors, and the number of paddles of each."""
  length = max(DIFFICULTIES[difficulty] // 3, 1)
  return GEOMETRIES[resolution].distractor_paddles // length, length
