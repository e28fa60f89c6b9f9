"""LRA Pathfinder and Path-X: do two discs lie on the same dashed snake?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from jaxformers.data.engine import encodings
from jaxformers.data.engine.preparation import data_folder, open_splits
from jaxformers.data.engine.source import Source
from jaxformers.data.generators.pathfinder import DIFFICULTIES, Settings
from jaxformers.data.sets import pathfinder as pathfinder_files
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Interval, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.pixels import PixelProtocol
from jaxformers.tasks.splits import slices, torch_random
from jaxformers.tasks.task import TASKS, Task

# All protocols have 80 / 10 / 10 percent. Skyformer shuffles without a seed, so
# its split cannot be reproduced: "skyformer" uses the split of "lra". "s4"
# divides pixels by 255.
PROTOCOLS = {
  "jaxformers": PixelProtocol(),
  "lra": PixelProtocol(pad_is_zero=True),
  "skyformer": PixelProtocol(pad_is_zero=True),
  "s4": PixelProtocol(scale=(0.0, 255.0), torch_split=True),
}
# Numbers in TransJect's paper use Skyformer's protocol.
PROTOCOLS["paper"] = PROTOCOLS["skyformer"]
DEFAULTS = Settings()


@TASKS.register("pathfinder")
def load_pathfinder(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  resolution: Annotated[int, Interval("[1, 2^12]")] = DEFAULTS.resolution,
  difficulty: str = DEFAULTS.difficulty,
  num_images: PositiveCount = DEFAULTS.num_images,
  seed: Count = DEFAULTS.seed,
  num_short: Count = 0,
  short_paddles: str = "",
) -> Task:
  """Generates Pathfinder once, on all cores, or reads LRA's files.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": ids are pixel values + 1. "lra", "skyformer" and
      "paper": ids are pixel values, and 0 is padding. "s4": inputs are real
      numbers.
    archive: path of LRA's lra_release.gz, of its unpacked folder, or of a
      folder below it, down to the level; "" generates the data.
    resolution: pixels per side: 32, 64, 128 (Path-X) or 256.
    difficulty: "easy", "intermediate" or "hard", which is LRA's task, or
      another number of paddles of a snake, such as "4".
    num_images: number of images to generate, or to require in the archive.
    seed: seed of the generated data, not of the run.
    num_short: number of images in each split of the curriculum, which has
      shorter snakes; 0 for no curriculum.
    short_paddles: numbers of paddles of these splits, such as "3 4 5".
  """
  settings = Settings(resolution, difficulty, num_images, seed)
  short = short_settings(settings, num_short, short_paddles)
  return _load("pathfinder", data_dir, protocol, archive, settings, short)


@TASKS.register("pathx")
def load_pathx(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  resolution: Annotated[int, Interval("[1, 2^12]")] = 128,
  difficulty: str = DEFAULTS.difficulty,
  num_images: PositiveCount = DEFAULTS.num_images,
  seed: Count = DEFAULTS.seed,
  num_short: Count = 0,
  short_paddles: str = "",
) -> Task:
  """Opens Path-X: Pathfinder in 128 x 128 pixels, 16,384 tokens.

  Generating all 200,000 images takes half an hour on two cores. The arguments
  are the same as in `load_pathfinder`.
  """
  settings = Settings(resolution, difficulty, num_images, seed)
  short = short_settings(settings, num_short, short_paddles)
  return _load("pathx", data_dir, protocol, archive, settings, short)


def short_settings(
  settings: Settings, num_images: int, paddles: str
) -> dict[str, Settings]:
  """Returns the settings of the splits of the curriculum, by their names.

  Args:
    settings: settings of the task.
    num_images: number of images of each split; 0 for no curriculum.
    paddles: numbers of paddles, such as "3 4 5"; "" for no curriculum.

  Raises:
    UserError: if only one of the two is given, for fewer than 10 images, or if
      the snakes are not shorter than in the task.
  """
  numbers = paddles.split()
  if not num_images and not numbers:
    return {}
  if num_images < 10 or not numbers:
    raise UserError(
      f"num_short={num_images} and short_paddles={paddles!r}: give at least 10 "
      "images and numbers of paddles, or neither of the two."
    )
  shorter = range(2, DIFFICULTIES[settings.difficulty])
  if len({*numbers}) < len(numbers) or {*numbers} - {*map(str, shorter)}:
    raise UserError(
      f"short_paddles={paddles!r}: give different numbers from 2 to "
      f"{shorter[-1]}, below the number at difficulty={settings.difficulty!r}."
    )
  names = {count: name for name, count in DIFFICULTIES.items()}
  return {
    f"train_{number}": dataclasses.replace(
      settings, difficulty=names[int(number)], num_images=num_images
    )
    for number in numbers
  }


def _source(settings: Settings, archive: str, folder: Path) -> Source:
  """Returns the source that generates images, or that reads an archive."""
  if not archive:
    return pathfinder_files.generated(settings, folder / "generated")
  if settings.seed != DEFAULTS.seed:
    raise UserError(
      f"seed={settings.seed} is for generated data, but the archive "
      f"{archive} is read: remove the seed or the archive."
    )
  return pathfinder_files.released(
    settings.resolution, settings.difficulty, settings.num_images
  )


def _load(
  name: str,
  data_dir: str,
  protocol: str,
  archive: str,
  settings: Settings,
  short: Mapping[str, Settings],
) -> Task:
  # Open the images as grey pixels.
  chosen = PROTOCOLS[choose("protocol of pathfinder", protocol, PROTOCOLS)]
  encoding = encodings.grey("grey", lambda image: image[..., 0])
  origin = _source(settings, archive, data_folder(data_dir))
  splits, info = open_splits(origin, encoding, data_dir, archive)
  # The data have one split, named after the level.
  images = splits[settings.difficulty]
  # Divide it by PyTorch's permutation for s4, else into consecutive parts.
  if chosen.torch_split:
    splits = torch_random(images, {"validation": 0.1, "test": 0.1})
  else:
    splits = slices(images, {"train": 80, "validation": 10, "test": 10})
  # Open the splits of the curriculum, which LRA does not have.
  for easier, shorter in short.items():
    origin = _source(shorter, "", data_folder(data_dir))
    opened, _ = open_splits(origin, encoding, data_dir)
    splits[easier] = opened[shorter.difficulty]
  return Task(
    name=name,
    protocol=protocol,
    splits=chosen.apply(splits),
    vocabulary=chosen.vocabulary,
    max_len=settings.resolution**2,
    num_classes=len(pathfinder_files.LABELS),
    classes=pathfinder_files.LABELS,
    trivial=baselines.HISTOGRAMS,
    info=info,
    curriculum=tuple(short),
  )
