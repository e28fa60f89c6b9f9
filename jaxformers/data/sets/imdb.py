"""The Large Movie Review Dataset (Maas et al. 2011): 50,000 reviews."""

from __future__ import annotations

from pathlib import Path

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source, collect

LABELS = ("neg", "pos")
PER_LABEL = 12_500  # In each of train and test.
MAX_BYTES = 1 << 30  # The authors' archive unpacks to 0.4 GB.


def _place(name: str) -> tuple[str, str] | None:
  """Returns (split, label) for the path of a review; None for other files."""
  # Match paths such as train/pos/0_9.txt, below any folder.
  parts = name.split("/")
  if len(parts) < 3 or not name.endswith(".txt"):
    return None
  split, label = parts[-3:-1]
  is_review = split in ("train", "test") and label in LABELS
  return (split, label) if is_review else None


def read(archive: Path) -> dict[str, list[Keyed]]:
  """Reads the reviews of an archive: `text`, as bytes, and `label`.

  Raises:
    UserError: for an archive that is truncated or has unexpected counts.
  """
  files = archives.placed_members(archive, _place, max_bytes=MAX_BYTES)
  # Use the path as key, like the stock builder.
  reviews = (
    (split, name, {"text": text, "label": label})
    for (split, label), name, text in files
  )
  expected = {"train": PER_LABEL, "test": PER_LABEL}
  return collect(reviews, archive, expected, LABELS)


SOURCE = Source(
  name="imdb_reviews",
  features={"text": bytes, "label": LABELS},
  read=read,
  archives=("aclImdb_v1.tar.gz", "aclImdb"),
  url="http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
  sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
  size=84_125_825,
  counts={"train": 25_000, "test": 25_000},
  homepage="http://ai.stanford.edu/~amaas/data/sentiment/",
)
