"""Sources of ListOps: generated expressions, or files of LRA's release."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.data.generators import listops, listops_text
from jaxformers.foundations.errors import UserError

LABELS = tuple("0123456789")
FEATURES = {"ids": np.uint8, "label": LABELS}
FILES = {
  f"basic_{short}.tsv": name for name, short in listops_text.FILES.items()
}
COUNTS = {"train": 96_000, "validation": 2_000, "test": 2_000}
MAX_BYTES = 1 << 35  # LRA's whole release unpacks to 18.6 GB.


def generated(settings: listops.Settings) -> Source:
  """Returns the source of generated expressions."""

  def read(archive: Path | None) -> Mapping[str, Iterator[Keyed]]:
    splits = listops.generate(settings)
    return {name: _rows(split) for name, split in splits.items()}

  # Name the folder after a digest: the settings are too many for a name.
  fields = dataclasses.asdict(settings)
  if not settings.num_short:
    fields = {k: v for k, v in fields.items() if k not in listops.SHORT}
  text = json.dumps(fields, sort_keys=True)
  return Source(
    name="listops",
    features=FEATURES,
    read=read,
    settings=fields,
    tag=blake2b(text.encode(), digest_size=6).hexdigest(),
    shuffled=False,
    least_bytes=settings.min_length
    * (settings.num_train + settings.num_validation + settings.num_test)
    + settings.short_min_length * settings.num_short,
  )


def _rows(split: Packed) -> Iterator[Keyed]:
  """Yields (number, example) of a generated split."""
  for i in range(len(split)):
    ids = split.tokens[split.starts[i] : split.stops[i]]
    yield i, {"ids": ids, "label": LABELS[split.labels[i]]}


def released(
  num_train: int = COUNTS["train"],
  num_validation: int = COUNTS["validation"],
  num_test: int = COUNTS["test"],
) -> Source:
  """Returns the source of LRA's `basic_{train,val,test}.tsv`.

  Reading compares every label with the value of its expression.

  Args:
    num_train, num_validation, num_test: number of expressions of each split.
  """
  counts = {"train": num_train, "validation": num_validation, "test": num_test}

  def read(archive: Path) -> dict[str, list[Keyed]]:
    return collect(_released(archive), archive, counts)

  # Name the folder after the counts if they differ from LRA's.
  return Source(
    name="listops",
    features=FEATURES,
    read=read,
    settings={"origin": "lra"},
    tag="lra" if counts == COUNTS else "-".join(map(str, counts.values())),
    archives=("lra_release.gz", "lra_release", "listops-1000"),
    shuffled=False,
  )


def _released(archive: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
  """Yields (split, key, example); the key is the number of the line."""
  for split, name, content in archives.placed_members(
    archive, archives.by_file(FILES), max_bytes=MAX_BYTES
  ):
    # Escape bytes that are not UTF-8: `parse` refuses the escaped token.
    lines = content.decode(errors="backslashreplace").splitlines()
    for number, line in enumerate(lines, 1):
      # Skip the header, and parse all other lines.
      if number == 1 and line.split() == ["Source", "Target"]:
        continue
      try:
        ids, label = listops_text.parse(line)
      except ValueError as error:
        raise UserError(
          f"{archive}, {name}, line {number}: {error} Download it again, or "
          "remove the archive option to generate ListOps; nothing was kept of "
          "it."
        ) from None
      yield split, number, {"ids": ids, "label": LABELS[label]}
