"""AG's News (Zhang et al. 2015): 127,600 articles, title and description."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.foundations.errors import UserError

LABELS = ("World", "Sports", "Business", "Sci/Tech")
PER_LABEL = {"train": 30_000, "test": 1_900}
MAX_BYTES = 1 << 28  # The authors' archive unpacks to 31 MB.


def _articles(archive: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
  """Yields (split, key, example) of every article."""
  for split, name, content in archives.placed_members(
    archive, _split, max_bytes=MAX_BYTES
  ):
    # Use the number of the row as key, like the stock builder.
    for key, row in enumerate(_rows(archive, name, content)):
      if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
        raise UserError(
          f"{archive}, {name}, row {key + 1}: expected a class from 1 to 4, a "
          f"title and a description, but found {str(row)[:80]}. "
          "Download it again."
        )
      label = LABELS[int(row[0]) - 1]
      texts = {"title": row[1].encode(), "description": row[2].encode()}
      yield split, key, {**texts, "label": label}


def _split(name: str) -> str | None:
  """Returns the split of train.csv or test.csv; None for other files."""
  stem, _, ending = name.rpartition("/")[2].partition(".")
  return stem if ending == "csv" and stem in PER_LABEL else None


def _rows(archive: Path, name: str, content: bytes) -> Iterator[list[str]]:
  """Yields the rows of a CSV file."""
  try:
    yield from csv.reader(io.StringIO(content.decode(), newline=""))
  except (csv.Error, UnicodeDecodeError) as error:
    raise UserError(
      f"{archive}, {name} is not a CSV file of AG's News ({error}). Download "
      "it again; no part of it was stored."
    ) from None


def read(archive: Path) -> dict[str, list[Keyed]]:
  """Reads the articles of both splits: `title`, `description` and `label`.

  Raises:
    UserError: for an archive that is truncated, has unexpected counts, or has
      no train.csv.
  """
  splits = _read_files(archive)
  if not splits["train"]:
    raise UserError(
      f"{archive} holds test.csv but no train.csv: fetch ag_news_csv.tar.gz, "
      "or choose the protocol test_only, which splits test.csv."
    )
  return splits


def read_test(archive: Path) -> dict[str, list[Keyed]]:
  """Reads the articles of test.csv only; raises the same errors as `read`."""
  return {"test": _read_files(archive)["test"]}


def _read_files(archive: Path) -> dict[str, list[Keyed]]:
  """Returns the articles of test.csv, and of train.csv if it exists."""
  # Require all articles of the existing files.
  rows = list(_articles(archive))
  splits = {"test", *(row[0] for row in rows)}
  expected = {split: PER_LABEL[split] for split in PER_LABEL if split in splits}
  return {"train": [], **collect(rows, archive, expected, LABELS)}


SOURCE = Source(
  name="ag_news_subset",
  features={"title": bytes, "description": bytes, "label": LABELS},
  read=read,
  archives=("ag_news_csv.tar.gz", "ag_news_csv", "ag_news"),
  url=(
    "https://drive.google.com/uc?export=download&id="
    "0Bz8a_Dbh9QhbUDNpeUdjb0wxRms"
  ),
  sha256="4e2fc37d369e6e317a8b62d0d2f11d379f8c3dde60c07c35a46b069a246498ad",
  size=11_784_327,
  counts={"train": 120_000, "test": 7_600},
  homepage="http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
)
# Source for archives that hold only test.csv.
TEST_SOURCE = dataclasses.replace(
  SOURCE, name="ag_news_test", read=read_test, counts={"test": 7_600}
)
