"""Pathfinder as a source: generated here, or read from LRA's release.

LRA ships every level as a folder of `imgs/K/sample_N.png` and
`metadata/K.npy`; `export` writes that layout.
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

FOLDERS = {
  "easy": "curv_baseline",
  "intermediate": "curv_contour_length_9",
  "hard": "curv_contour_length_14",
}
LABELS = ("different", "same")  # Snakes on which the discs lie.
MAX_BYTES = 1 << 35  # LRA's whole release unpacks to 18.6 GB.


def generated(settings: Settings, folder: Path) -> Source:
  """Returns the source of generated images.

  Args:
    settings: settings of the data set.
    folder: folder for finished chunks of images, so that a generation that was
      stopped resumes; they are removed at its end.
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
    # Compressed images take much more than half a bit a pixel.
    least_bytes=settings.num_images * settings.resolution**2 // 16,
    finish=lambda: shutil.rmtree(folder / source.key, ignore_errors=True),
  )
  return source


def _features(resolution: int) -> dict[str, Any]:
  image = (resolution, resolution, 1)
  return {"id": bytes, "image": image, "label": LABELS}


def _generate(settings: Settings, work: Path) -> Iterator[Keyed]:
  """Generates the chunks that a folder lacks, and yields all images."""
  from jaxformers.data.generators import snakes  # Numba takes half a second.

  work.mkdir(parents=True, exist_ok=True)
  # Generate missing chunks, in whatever order they are finished.
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
  # Read them in order. A chunk that is damaged is generated again.
  for start in starts:
    chunk = _read_chunk(_chunk(work, start)) or snakes.chunk(settings, start)
    for index, (image, label) in enumerate(zip(*chunk, strict=True), start):
      label = LABELS[label]
      yield index, {"id": str(index), "image": image, "label": label}


def _chunk(work: Path, start: int) -> Path:
  return work / f"{start:09d}.npz"


def _write_chunk(path: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
  """Writes a chunk with its digest, completely or not at all."""
  # Write under another name, so that a chunk that exists is complete.
  staged = path.with_name(f".{path.name}.staged")
  digest = digests.of_parts(pixels, labels)
  try:
    with staged.open("wb") as file:
      np.savez(file, pixels=pixels, labels=labels, digest=digest)
    staged.rename(path)
  finally:
    staged.unlink(missing_ok=True)


def _read_chunk(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns the pixels and labels of a chunk, or None for a damaged file."""
  try:
    with path.open("rb") as file, np.load(file) as arrays:
      pixels, labels = arrays["pixels"], arrays["labels"]
      is_intact = str(arrays["digest"]) == digests.of_parts(pixels, labels)
  except Exception:  # A damaged file makes its readers raise anything.
    return None
  return (pixels, labels) if is_intact else None


def released(resolution: int, difficulty: str, num_images: int) -> Source:
  """Returns the source of one level of LRA's release.

  Args:
    resolution, difficulty: level of the release.
    num_images: number of images; one empty file, which LRA skips too, is
      allowed.
  """

  def read(archive: Path) -> dict[str, list[Keyed]]:
    # LRA's release has one empty file at most.
    rows = list(_released(archive, resolution, difficulty))
    expected = {difficulty: num_images - (None in rows)}
    return collect(filter(None, rows), archive, expected)

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

  Keys are those of LRA's builder. An empty picture is None.
  """
  # Read all files of the level: pictures come in any order.
  wanted = functools.partial(_is_wanted, archive, resolution, difficulty)
  files = {
    "/".join(name.split("/")[-3:]): content
    for name, content in archives.members(
      archive, max_bytes=MAX_BYTES, wanted=wanted
    )
  }
  metadata = [place for place in files if place.endswith(".npy")]
  # Match every row of the metadata with its picture.
  index = 0
  for place in sorted(metadata, key=_number):
    for number, fields in enumerate(_rows(archive, place, files[place]), 1):
      folder, file, label = fields[0], fields[1], fields[3]
      name = f"{folder}/{file}"
      if name not in files or label not in ("0", "1"):
        raise UserError(
          f"{archive}, {place}, row {number}: no picture {name!r} with a label "
          f"0 or 1, but the label {label!r}. Fetch it again; nothing was kept "
          "of it."
        )
      # Skip the one empty file of the release.
      picture = files[name]
      if not picture:
        yield None
        continue
      # Refuse a file that is not a complete grey PNG of the resolution.
      size = (resolution, resolution)
      refuse = functools.partial(archives.refusal, archive, name)
      pictures.decode(picture, refuse, formats=("PNG",), mode="L", size=size)
      label = LABELS[int(label)]
      example = {"id": str(index), "image": picture, "label": label}
      yield difficulty, f"{folder}_{file}_{number}", example
      index += 1


def _number(place: str) -> tuple[int, str]:
  """Returns a sort key: metadata/12.npy comes after metadata/9.npy."""
  stem = place.rpartition("/")[2].removesuffix(".npy")
  return (int(stem) if stem.isdigit() else -1), stem


def _is_wanted(
  archive: Path, resolution: int, difficulty: str, name: str
) -> bool:
  """Returns True for a file of the level; the archive may be a part of it."""
  folder = (archive.name,) if archive.is_dir() else ()
  parts = ("", "", *folder, *name.split("/"))
  is_picture = parts[-3] == "imgs" and name.endswith(".png")
  is_metadata = parts[-2] == "metadata" and name.endswith(".npy")
  if not is_picture and not is_metadata:
    return False
  # Compare the names of the folders above with those of the level.
  all_sizes = {f"pathfinder{size}" for size in pathfinder.GEOMETRIES}
  levels = [part for part in parts if part in FOLDERS.values()]
  sizes = [part for part in parts if part in all_sizes]
  is_size = sizes in ([], [f"pathfinder{resolution}"])
  return levels == [FOLDERS[difficulty]] and is_size


def _rows(archive: Path, place: str, content: bytes) -> list[list[str]]:
  """Parses metadata: text, as LRA ships it, or NumPy, as its generator does."""
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
  """Writes generated images in LRA's layout, 1,000 to a subfolder.

  Files are folder/pathfinderN/LEVEL/imgs/K/sample_M.png and metadata/K.npy,
  which is text of one line an image: sub-path, file, index, label, continuity,
  paddles of a target and of a distractor, paddle length and thickness, margin,
  number of paddle contrasts.

  Args:
    settings: settings of the data set.
    folder: folder of the export.

  Raises:
    UserError: if the level exists already.
    OSError: if it cannot be written; nothing is left of it.
  """
  # Refuse to mix two exports in one folder.
  name = f"pathfinder{settings.resolution}"
  level = folder / name / FOLDERS[settings.difficulty]
  if level.exists():
    raise UserError(
      f"{level} exists already: delete it, or export to another folder."
    )
  # Write under another name, so that a level that exists is complete.
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
  # Remove the remains of an export that was killed.
  shutil.rmtree(level, ignore_errors=True)
  (level / "metadata").mkdir(parents=True)
  for index in tqdm.trange(
    settings.num_images, desc="exporting", file=sys.stderr, disable=None
  ):
    # Every thousand images have a subfolder and a file of metadata.
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
