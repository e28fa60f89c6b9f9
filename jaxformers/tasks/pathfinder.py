"""LRA Pathfinder and Path-X: do two discs lie on the same dashed snake?"""

from __future__ import annotations

from jaxformers.data.engine import encodings, preparation
from jaxformers.data.generators import pathfinder
from jaxformers.data.sets import pathfinder as pathfinder_files
from jaxformers.errors import UserError
from jaxformers.registry import choose
from jaxformers.tasks.pixels import Protocol
from jaxformers.tasks.splits import slices, torch_random
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  histogram_regression,
  majority_class,
)

# 80 / 10 / 10 percent in all. Skyformer shuffles without a seed, so that its
# split cannot be had; ours is that of "lra". s4: x / 255.
PROTOCOLS = {
  "jaxformers": Protocol(),
  "lra": Protocol(pad_is_zero=True),
  "skyformer": Protocol(pad_is_zero=True),
  "s4": Protocol(scale=(0.0, 255.0), torch_split=True),
}
DEFAULTS = pathfinder.Settings()


@TASKS.register("pathfinder")
def load_pathfinder(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  resolution: int = DEFAULTS.resolution,
  difficulty: str = DEFAULTS.difficulty,
  num_images: int = DEFAULTS.num_images,
  seed: int = DEFAULTS.seed,
) -> Task:
  """Generates Pathfinder (once, on all cores), or reads LRA's files.

  Args:
    data_dir: see `data_folder`.
    protocol: "jaxformers" (ids value + 1), "lra" and "skyformer" (ids are
      values, 0 is padding), "s4" (real numbers).
    archive: LRA's lra_release.gz, its unpacked folder, or a folder below it
      down to the level; "" generates.
    resolution: 32, 64, 128 (Path-X) or 256 pixels a side.
    difficulty: "easy", "intermediate" or "hard", which is LRA's task.
    num_images: to generate, or that the archive must hold.
    seed: of the generated data, not of the run.
  """
  return _load(
    "pathfinder",
    data_dir,
    protocol,
    archive,
    pathfinder.Settings(resolution, difficulty, num_images, seed),
  )


@TASKS.register("pathx")
def load_pathx(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  resolution: int = 128,
  difficulty: str = DEFAULTS.difficulty,
  num_images: int = DEFAULTS.num_images,
  seed: int = DEFAULTS.seed,
) -> Task:
  """Path-X: Pathfinder in 128 x 128 pixels, 16,384 tokens.

  All 200,000 take half an hour to generate on two cores. Arguments are those of
  `load_pathfinder`.
  """
  return _load(
    "pathx",
    data_dir,
    protocol,
    archive,
    pathfinder.Settings(resolution, difficulty, num_images, seed),
  )


def _load(
  name: str,
  data_dir: str,
  protocol: str,
  archive: str,
  settings: pathfinder.Settings,
) -> Task:
  chosen = PROTOCOLS[choose("protocol of pathfinder", protocol, PROTOCOLS)]
  resolution, difficulty = settings.resolution, settings.difficulty
  folder = data_folder(data_dir)
  if archive:
    if settings.seed != DEFAULTS.seed:
      raise UserError(
        f"seed={settings.seed} is of generated data, and the archive {archive} "
        "is read as it is. Leave one of the two out."
      )
    origin = pathfinder_files.released(
      resolution, difficulty, settings.num_images
    )
  else:
    origin = pathfinder_files.generated(settings, folder / "generated")
  encoding = encodings.grey("grey", lambda image: image[..., 0])
  splits, info = preparation.open_splits(
    origin, encoding, data_dir=folder, archive=archive
  )
  whole = splits[difficulty]
  if chosen.torch_split:
    splits = torch_random(whole, {"validation": 0.1, "test": 0.1})
  else:
    splits = slices(whole, {"train": 80, "validation": 10, "test": 10})
  return Task(
    name=name,
    protocol=protocol,
    splits=chosen.apply(splits),
    selection="validation",
    max_len=resolution**2,
    num_classes=2,
    trivial={
      "majority class": majority_class,
      "histogram regression": histogram_regression,
    },
    info=info,
    **chosen.vocabulary(),
  )
