"""ADE20K with the 150 classes of its scene-parsing challenge.

Source: Zhou et al. 2017.

The data set has 20,210 training images and 2,000 others. The authors call the
others validation, and tensorflow-datasets calls them test (`scene_parse150`);
papers report scores on them. The user has to unpack ADEChallengeData2016.zip.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import tqdm

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import pictures
from jaxformers.data.engine.source import Keyed, Source
from jaxformers.data.images.splits import pool
from jaxformers.foundations.errors import UserError

FOLDERS = {"train": "training", "test": "validation"}
COUNTS = {"train": 20_210, "test": 2_000}
NUM_CLASSES = 150
MAX_BYTES = 1 << 33


def _examples(archive: Path) -> dict[str, list[Keyed]]:
  """Returns the scenes of both splits: `image`, JPEG, and `annotation`, PNG."""
  # Collect the two files of every scene.
  scenes: dict[tuple[str, str], dict[str, bytes]] = {}
  members = archives.placed_members(archive, _place, max_bytes=MAX_BYTES)
  for (split, key, kind), _, content in members:
    files = scenes.setdefault((split, key), {})
    if kind in files:
      raise UserError(
        f"{archive} holds the {kind} of {key!r} twice: give the folder "
        "ADEChallengeData2016 with only its own files in it."
      )
    files[kind] = content
  # Refuse scenes that lack one of the two files.
  splits: dict[str, list[Keyed]] = {name: [] for name in FOLDERS}
  for (split, key), example in sorted(scenes.items()):
    if len(example) < 2:
      raise UserError(
        f"{archive} has only the {next(iter(example))} of {key!r}: it is "
        "incomplete. Unpack it again; nothing was kept of it."
      )
    splits[split].append((key, {"id": key, **example}))
  return splits


def _check(archive: Path, split: str, key: str, example: Any) -> None:
  """Refuses a scene whose files cannot be decoded or differ in size."""
  # Decode both files; the annotation needs a label for every pixel.
  place = f"{FOLDERS[split]}/{key}"
  refuse = functools.partial(archives.refusal, archive)
  image = pictures.decode(
    example["image"], functools.partial(refuse, f"images/{place}.jpg")
  )
  pictures.decode(
    example["annotation"],
    functools.partial(refuse, f"annotations/{place}.png"),
    formats=("PNG",),
    mode="L",
    size=image.size,
  )


def _place(name: str) -> tuple[str, str, str] | None:
  """Returns (split, key, field) of the path of a file; None for other files."""
  # Match paths such as images/training/NAME.jpg, below any folder.
  kinds = {"images": ("image", ".jpg"), "annotations": ("annotation", ".png")}
  splits = {folder: split for split, folder in FOLDERS.items()}
  top, folder, file = ["", "", *name.split("/")][-3:]
  field, ending = kinds.get(top, ("", ""))
  if not field or folder not in splits or not file.endswith(ending):
    return None
  # Escape names that are not UTF-8: surrogates cannot be stored.
  key = os.fsencode(file.rpartition(".")[0])
  return splits[folder], key.decode(errors="backslashreplace"), field


def source(
  num_train: int = COUNTS["train"], num_test: int = COUNTS["test"]
) -> Source:
  """Returns the source of a folder with the given numbers of scenes.

  Args:
    num_train: number of scenes in training/; numbers other than the authors'
      are for a part of the data set, or for another one with the same layout.
    num_test: number of scenes in validation/.
  """
  counts = {"train": num_train, "test": num_test}

  def read(archive: Path) -> dict[str, list[Keyed]]:
    # Check the counts first: a part of the set must not count as the whole.
    splits = _examples(archive)
    if {name: len(rows) for name, rows in splits.items()} != counts:
      raise UserError(
        f"{archive} holds {len(splits['train']):,} training and "
        f"{len(splits['test']):,} validation scenes instead of {num_train:,} "
        f"and {num_test:,}: give the folder ADEChallengeData2016, with images/ "
        "and annotations/ in it. To use a part of the set, set num_train and "
        "num_test of the task to its counts. Nothing was kept of it."
      )
    # Decode every file once, so that no run fails at a damaged file.
    for split, rows in splits.items():
      checks = pool().map(lambda row, s=split: _check(archive, s, *row), rows)
      bar = {"file": sys.stderr, "disable": None}
      list(tqdm.tqdm(checks, f"checking {split}", len(rows), **bar))
    return splits

  return Source(
    name="scene_parse150",
    features={"id": bytes, "image": bytes, "annotation": bytes},
    read=read,
    settings={} if counts == COUNTS else counts,
    archives=("ADEChallengeData2016", "ADEChallengeData2016.tar"),
    local_only=(
      "is a zip, http://data.csail.mit.edu/places/ADEchallenge/"
      "ADEChallengeData2016.zip, to be unpacked"
    ),
    homepage="http://sceneparsing.csail.mit.edu/",
    counts=counts,
  )
