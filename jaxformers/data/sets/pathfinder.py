"""Sources of Pathfinder: generated images, or files of LRA's release.

LRA ships every level as a folder of `imgs/K/sample_N.png` and `metadata/K.npy`.
`export` writes generated images in the same layout.
"""

from __future__ import annotations

import functools
import io
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from PIL import Image

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import digests, pictures
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.data.generators import pathfinder
from jaxformers.data.generators.pathfinder import CHUNK, Settings
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

FOLDERS = {
  "easy": "curv_baseline",
  "intermediate": "curv_contour_length_9",
  "hard": "curv_contour_length_14",
}
LABELS = ("different", "same")  # The discs lie on different snakes, or on one.
MAX_BYTES = 1 << 35  # LRA's whole release unpacks to 18.6 GB.


def generated(settings: Settings, folder: Path) -> Source:
  """Returns the source of generated images.

  Args:
    settings: settings of the data set.
    folder: folder for finished chunks of images, with which an interrupted
      generation resumes. The chunks are removed at the end.
  """

  def read(archive: Path | None) -> Mapping[str, Iterator[Keyed]]:
    return {settings.difficulty: _generate(settings, folder / source.key)}

  names = ("difficulty", "num_images", "seed")
  source = Source(
    name=f"pathfinder{settings.resolution}",
    features=_features(settings.resolution),
    read=read,
    settings={name: getattr(settings, name) for name in names},
    shuffled=False,
    # Lower bound: compressed images take more than half a bit per pixel.
    least_bytes=settings.num_images * settings.resolution**2 // 16,
    finish=lambda: shutil.rmtree(folder / source.key, ignore_errors=True),
  )
  return source


def _features(resolution: int) -> dict[str, Any]:
  image = (resolution, resolution, 1)
  return {"id": bytes, "image": image, "label": LABELS}


def _generate(settings: Settings, work: Path) -> Iterator[Keyed]:
  """Generates the missing chunks of a folder, and yields all images."""
  from jaxformers.data.generators import snakes  # Numba takes half a second.

  work.mkdir(parents=True, exist_ok=True)
  # Generate the missing chunks in parallel, and save each when it is ready.
  starts = range(0, settings.num_images, CHUNK)
  missing = [start for start in starts if not _chunk(work, start).exists()]
  with tqdm.tqdm(
    total=settings.num_images,
    initial=min((len(starts) - len(missing)) * CHUNK, settings.num_images),
    desc=f"generating {work.name}",
    unit="image",
    file=sys.stderr,
    disable=None,
  ) as bar:
    for start, (pixels, labels) in snakes.chunks(settings, missing):
      _write_chunk(_chunk(work, start), pixels, labels)
      bar.update(len(labels))
  # Read all chunks in order; generate a damaged chunk again.
  for start in starts:
    chunk = _read_chunk(_chunk(work, start)) or snakes.chunk(settings, start)
    for index, (image, label) in enumerate(zip(*chunk, strict=True), start):
      label = LABELS[label]
      yield index, {"id": str(index), "image": image, "label": label}


def _chunk(work: Path, start: int) -> Path:
  return work / f"{start:09d}.npz"


def _write_chunk(path: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
  """Writes a chunk with its digest, completely or not at all."""
  # Write a temporary file, then rename it: an existing chunk is complete.
  staged = path.with_name(f".{path.name}.staged")
  digest = digests.of_parts(pixels, labels)
  try:
    with staged.open("wb") as file:
      np.savez(file, pixels=pixels, labels=labels, digest=digest)
    staged.rename(path)
  finally:
    staged.unlink(missing_ok=True)


def _read_chunk(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns the pixels and labels of a chunk; None for a damaged file."""
  try:
    with path.open("rb") as file, np.load(file) as arrays:
      pixels, labels = arrays["pixels"], arrays["labels"]
      is_intact = str(arrays["digest"]) == digests.of_parts(pixels, labels)
  except Exception:  # Readers raise errors of any class for damaged files.
    return None
  return (pixels, labels) if is_intact else None


def released(resolution: int, difficulty: str, num_images: int) -> Source:
  """Returns the source of one level of LRA's release.

  Args:
    resolution, difficulty: level of the release.
    num_images: number of images. One of them may be an empty file, which is
      skipped, as in LRA.

  Raises:
    UserError: for a level that the release does not have.
  """

  def read(archive: Path) -> dict[str, list[Keyed]]:
    # Allow one empty file, as in LRA's release.
    rows = list(_released(archive, resolution, difficulty))
    expected = {difficulty: num_images - (None in rows)}
    return collect(filter(None, rows), archive, expected)

  choose("difficulty of the release", difficulty, FOLDERS)
  settings: dict[str, Any] = {"difficulty": difficulty, "origin": "lra"}
  if num_images != 200_000:
    settings["num_images"] = num_images
  return Source(
    name=f"pathfinder{resolution}",
    features=_features(resolution),
    read=read,
    settings=settings,
    archives=("lra_release.gz", "lra_release", f"pathfinder{resolution}"),
  )


def _released(
  archive: Path, resolution: int, difficulty: str
) -> Iterator[tuple[str, str, Mapping[str, Any]] | None]:
  """Yields (split, key, example) in the order of the metadata.

  Yields None for an empty picture. Keys are equal to the keys of LRA's builder.
  """
  # Read all files of the level first: pictures are in no order.
  wanted = functools.partial(_is_wanted, archive, resolution, difficulty)
  files = {
    "/".join(name.split("/")[-3:]): content
    for name, content in archives.members(
      archive, max_bytes=MAX_BYTES, wanted=wanted
    )
  }
  metadata = [place for place in files if place.endswith(".npy")]
  # Match every row of the metadata with a picture.
  index = 0
  for place in sorted(metadata, key=_number):
    for number, fields in enumerate(_rows(archive, place, files[place]), 1):
      folder, file, label = fields[0], fields[1], fields[3]
      name = f"{folder}/{file}"
      if name not in files or label not in ("0", "1"):
        raise UserError(
          f"{archive}, {place}, row {number}: no picture {name!r} with a label "
          f"0 or 1, but the label {label!r}. Download it again; no part of "
          "it was kept."
        )
      # Skip the one empty file of the release.
      picture = files[name]
      if not picture:
        yield None
        continue
      # Refuse a file that is not a complete grey PNG with this resolution.
      size = (resolution, resolution)
      refuse = functools.partial(archives.refusal, archive, name)
      pictures.decode(picture, refuse, formats=("PNG",), mode="L", size=size)
      label = LABELS[int(label)]
      example = {"id": str(index), "image": picture, "label": label}
      yield difficulty, f"{folder}_{file}_{number}", example
      index += 1


def _number(place: str) -> tuple[int, str]:
  """Returns a sort key by which metadata/12.npy comes after metadata/9.npy."""
  stem = place.rpartition("/")[2].removesuffix(".npy")
  return (int(stem) if stem.isdigit() else -1), stem


def _is_wanted(
  archive: Path, resolution: int, difficulty: str, name: str
) -> bool:
  """Returns True for a file of the level.

  The archive may be a part of the release, down to the folder of one level.
  """
  # Match imgs/K/NAME.png and metadata/K.npy.
  folder = (archive.name,) if archive.is_dir() else ()
  parts = ("", "", *folder, *name.split("/"))
  is_picture = parts[-3] == "imgs" and name.endswith(".png")
  is_metadata = parts[-2] == "metadata" and name.endswith(".npy")
  if not is_picture and not is_metadata:
    return False
  # Compare the folders of the path with the resolution and the difficulty.
  all_sizes = {f"pathfinder{size}" for size in pathfinder.GEOMETRIES}
  levels = [part for part in parts if part in FOLDERS.values()]
  sizes = [part for part in parts if part in all_sizes]
  is_size = sizes in ([], [f"pathfinder{resolution}"])
  return levels == [FOLDERS[difficulty]] and is_size


def _rows(archive: Path, place: str, content: bytes) -> list[list[str]]:
  """Returns the rows of a metadata file.

  LRA ships metadata as text; its generator writes NumPy arrays.
  """
  try:
    if content.startswith(b"\x93NUMPY"):
      table = np.load(io.BytesIO(content), allow_pickle=False)
      rows = table.astype(str).tolist() if table.ndim == 2 else [[]]
    else:
      rows = [line.split(" ") for line in content.decode().splitlines()]
  except (ValueError, EOFError, MemoryError) as error:
    raise archives.refusal(archive, place, f"no metadata ({error})") from None
  if any(len(row) < 4 for row in rows):
    problem = "metadata with rows of fewer than four fields"
    raise archives.refusal(archive, place, problem)
  return rows


def export(settings: Settings, folder: Path) -> None:
  """Writes generated images in LRA's layout, 1,000 per subfolder.

  The files are folder/pathfinderN/LEVEL/imgs/K/sample_M.png and metadata/K.npy.
  The metadata are text with one line per image: sub-path, file, index, label,
  continuity, number of paddles of a target and of a distractor, length and
  thickness of paddles, margin, number of paddle contrasts.

  Args:
    settings: settings of the data set.
    folder: folder of the export.

  Raises:
    UserError: if the level exists already.
    OSError: if the level cannot be written; partial files are removed.
  """
  # Refuse to mix two exports in one folder.
  name = f"pathfinder{settings.resolution}"
  # Other numbers of paddles have folders with similar names.
  other = f"curv_contour_length_{settings.difficulty}"
  level = folder / name / FOLDERS.get(settings.difficulty, other)
  if level.exists():
    raise UserError(
      f"{level} exists already: delete it, or export to another folder."
    )
  # Write a temporary folder, then rename it: an existing level is complete.
  level.parent.mkdir(parents=True, exist_ok=True)
  staged = level.with_name(f".{level.name}.staged")
  try:
    _write_level(settings, staged)
    staged.rename(level)
  finally:
    shutil.rmtree(staged, ignore_errors=True)


def _write_level(settings: Settings, level: Path) -> None:
  """Writes the images and metadata of one level into a new folder."""
  from jaxformers.data.generators import snakes  # Numba takes half a second.

  resolution, difficulty = settings.resolution, settings.difficulty
  geometry = pathfinder.GEOMETRIES[resolution]
  contour = pathfinder.DIFFICULTIES[difficulty]
  _, length = pathfinder.distractor_counts(resolution, difficulty)
  paddles = f"{geometry.continuity} {contour} {length} {geometry.paddle_length}"
  # Remove the remains of a killed export.
  shutil.rmtree(level, ignore_errors=True)
  (level / "metadata").mkdir(parents=True)
  for index in tqdm.trange(
    settings.num_images, desc="exporting", file=sys.stderr, disable=None
  ):
    # Write the image, and append its line to the metadata of the subfolder.
    k, m = divmod(index, CHUNK)
    folder, file = level / "imgs" / str(k), f"sample_{m}.png"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = snakes.sample(settings, index)
    Image.fromarray(drawn.pixels).save(folder / file)
    with (level / "metadata" / f"{k}.npy").open("a") as metadata:
      metadata.write(
        f"imgs/{k} {file} {m} {drawn.label} {paddles} {geometry.thickness} "
        f"{drawn.margin} 1\n"
      )
