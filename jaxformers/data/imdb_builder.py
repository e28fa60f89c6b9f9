"""The Large Movie Review Dataset as a tensorflow-datasets builder.

The stock `imdb_reviews` needs TensorFlow to unpack the archive; this one reads
it with `tarfile` and writes array_record. Imported only to prepare the data:
tensorflow-datasets is slow to import.
"""

from __future__ import annotations

import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

URL = "http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
SIZE = 84_125_825
LABELS = ("neg", "pos")


def read_reviews(
  archive: Path, expected: int
) -> Iterator[tuple[str, str, str, bytes]]:
  """Yields (split, label, file name, text) of an archive, then checks it.

  Args:
    archive: aclImdb_v1.tar.gz; members other than reviews are passed over, and
      nothing is written to disk.
    expected: reviews of each label in each split.

  Raises:
    ValueError: for an archive that is cut short or holds other counts.
  """
  counts: Counter[tuple[str, str]] = Counter()
  try:
    with tarfile.open(archive, "r:gz") as tar:
      for member in tar:
        parts = member.name.split("/")
        if not member.isfile() or len(parts) != 4:
          continue
        _, split, label, name = parts
        if split in ("train", "test") and label in LABELS:
          counts[split, label] += 1
          yield split, label, name, tar.extractfile(member).read()
  except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
    raise ValueError(
      f"{archive} cannot be read to its end ({error}): it is truncated or no "
      "gzipped tar. Fetch it again; nothing was kept of it."
    ) from error
  for split in ("train", "test"):
    for label in LABELS:
      if counts[split, label] != expected:
        raise ValueError(
          f"{archive} holds {counts[split, label]} reviews under {split}/"
          f"{label} instead of {expected}: it is not aclImdb_v1.tar.gz or "
          "was cut short. Fetch it again; nothing was kept of it."
        )


class JaxformersImdb(tfds.core.GeneratorBasedBuilder):
  """Reviews as their bytes, label 0 (negative) or 1 (positive).

  Attributes:
    archive: a local aclImdb_v1.tar.gz, or None to download it.
    expected: reviews of each label in each split.
  """

  VERSION = tfds.core.Version("1.0.0")
  archive: Path | None = None
  expected = 12_500
  url_infos = {  # noqa: RUF012
    URL: tfds.download.checksums.UrlInfo(
      size=SIZE,
      checksum=SHA256,
      filename="aclImdb_v1.tar.gz",
    )
  }

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      homepage="http://ai.stanford.edu/~amaas/data/sentiment/",
      features=tfds.features.FeaturesDict(
        {
          "text": tfds.features.Text(),
          "label": tfds.features.ClassLabel(names=list(LABELS)),
        }
      ),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    archive = self.archive or Path(dl_manager.download(URL))
    # One pass over the archive: a second would double the time to unpack.
    reviews: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for split, label, name, text in read_reviews(archive, self.expected):
      row = (f"{label}/{name}", {"text": text, "label": label})
      reviews.setdefault(split, []).append(row)
    return {
      split: self._generate_examples(rows) for split, rows in reviews.items()
    }

  def _generate_examples(self, rows: list[Any]) -> Iterator[Any]:
    yield from rows
