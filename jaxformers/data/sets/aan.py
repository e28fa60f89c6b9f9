"""Pairs of papers of the ACL Anthology Network, as LRA's TSV files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.errors import UserError

LABELS = ("0", "1")  # 1: one of the two cites the other.
FILES = {
  "new_aan_pairs.train.tsv": "train",
  "new_aan_pairs.eval.tsv": "validation",
  "new_aan_pairs.test.tsv": "test",
}
COUNTS = {"train": 147_086, "validation": 18_090, "test": 17_437}
MAX_BYTES = 1 << 35  # LRA's whole release unpacks to 18.6 GB.


def _pairs(archive: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
  """Yields (split, key, example); the key is the number of the line."""
  for split, name, content in archives.placed_members(
    archive, archives.by_file(FILES), max_bytes=MAX_BYTES
  ):
    # Split at \n alone and unquote nothing: texts hold \r and quotes.
    for number, ended in enumerate(io.BytesIO(content), 1):
      line = ended.removesuffix(b"\n")
      if not line:
        continue
      # A line is a label, two ids and two texts.
      fields = line.split(b"\t")
      if len(fields) != 5 or fields[0] not in (b"0.0", b"1.0"):
        raise UserError(
          f"{archive}, {name}, line {number}: expected a label 0.0 or 1.0, two "
          f"ids and two texts between tabs, but found {line[:60]!r}... Fetch "
          "it again; nothing was kept of it."
        )
      texts = {"text1": fields[3], "text2": fields[4]}
      label = LABELS[fields[0] == b"1.0"]
      yield split, f"{number:06d}", {**texts, "label": label}


def source(
  num_train: int = COUNTS["train"],
  num_validation: int = COUNTS["validation"],
  num_test: int = COUNTS["test"],
) -> Source:
  """Returns the source of three TSV files with known numbers of lines.

  Args:
    num_train, num_validation, num_test: number of pairs of each split; other
      numbers than LRA's are for a stand-in of the same format.
  """
  counts = {"train": num_train, "validation": num_validation, "test": num_test}

  def read(archive: Path | None) -> dict[str, list[Keyed]]:
    advice = (
      "If this number of pairs is meant, set num_train, num_validation and "
      "num_test of the task to it."
    )
    return collect(_pairs(archive), archive, counts, advice=advice)

  # A stand-in has a folder of its own, named after its counts.
  return Source(
    name="aan_pairs",
    features={"text1": bytes, "text2": bytes, "label": LABELS},
    read=read,
    settings={} if counts == COUNTS else counts,
    archives=("lra_release.gz", "lra_release", "retrieval_pairs.tar.xz"),
    local_only=(
      "cannot be downloaded alone: LRA's release of 7.7 GB holds it, "
      "https://storage.googleapis.com/long-range-arena/lra_release.gz"
    ),
    shuffled=False,
  )
