"""Reads pairs of papers of the ACL Anthology Network from LRA's TSV files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source, check_count
from jaxformers.foundations.errors import UserError

LABELS = ("0", "1")  # 1: one of the two papers cites the other.
FILES = {
  "new_aan_pairs.train.tsv": "train",
  "new_aan_pairs.eval.tsv": "validation",
  "new_aan_pairs.test.tsv": "test",
}
COUNTS = {"train": 147_086, "validation": 18_090, "test": 17_437}
MAX_BYTES = 1 << 35  # LRA's whole release unpacks to 18.6 GB.
ADVICE = (
  "If this number of pairs is intended, set num_train, num_validation and "
  "num_test of the task to the numbers of pairs."
)


def _pairs(archive: Path, split: str, count: int) -> Iterator[Keyed]:
  """Yields the pairs of a split, each with the number of its line.

  Reads the archive to its end, and holds only one line at a time.

  Raises:
    UserError: for a broken line, or a number of pairs other than `count`.
  """

  def is_wanted(path: str) -> bool:
    return FILES.get(path.rpartition("/")[2]) == split

  # Split at \n only, and do not unquote fields: texts contain \r and quotes.
  lines = archives.lines(archive, is_wanted, max_bytes=MAX_BYTES)
  num_pairs, first = 0, ""
  for number, (name, line) in enumerate(lines, 1):
    # Refuse a second file of the split.
    first = first or name
    if name != first:
      raise UserError(
        f"{archive} holds {first} and {name}: give an archive or a folder with "
        "one file of each name. Nothing was kept of it."
      )
    if not line:
      continue
    # Parse a label, two ids and two texts.
    fields = line.split(b"\t")
    if len(fields) != 5 or fields[0] not in (b"0.0", b"1.0"):
      raise UserError(
        f"{archive}, {name}, line {number}: expected a label 0.0 or 1.0, two "
        f"ids and two texts between tabs, but found {line[:60]!r}... Download "
        "it again; nothing was kept of it."
      )
    texts = {"text1": fields[3], "text2": fields[4]}
    yield number, {**texts, "label": LABELS[fields[0] == b"1.0"]}
    num_pairs += 1
  check_count(archive, split, num_pairs, count, advice=ADVICE)


def source(
  num_train: int = COUNTS["train"],
  num_validation: int = COUNTS["validation"],
  num_test: int = COUNTS["test"],
) -> Source:
  """Returns the source of three TSV files with known numbers of lines.

  Args:
    num_train, num_validation, num_test: number of pairs of each split; numbers
      other than LRA's are for another data set in the same format.
  """
  counts = {"train": num_train, "validation": num_validation, "test": num_test}

  def read(archive: Path) -> dict[str, Iterator[Keyed]]:
    return {name: _pairs(archive, name, counts[name]) for name in counts}

  # Name the folder of another data set after its counts.
  return Source(
    name="aan_pairs",
    features={"text1": bytes, "text2": bytes, "label": LABELS},
    read=read,
    settings={} if counts == COUNTS else counts,
    archives=("lra_release.gz", "lra_release", "retrieval_pairs.tar.xz"),
    local_only=(
      "cannot be downloaded separately: it is a part of LRA's release, 7.7 GB, "
      "https://storage.googleapis.com/long-range-arena/lra_release.gz"
    ),
    shuffled=False,
  )
