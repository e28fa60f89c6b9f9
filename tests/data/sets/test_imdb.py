import pytest

from jaxformers.data.engine import archive
from jaxformers.data.sets import imdb
from tests.data.archives import imdb as reviews
from tests.data.archives import write_folder, write_tar


def test_imdb_reads_reviews_and_skips_other_files(tmp_path, monkeypatch):
  monkeypatch.setattr(imdb, "PER_LABEL", 2)
  path = write_tar(tmp_path / "a.tar.gz", reviews(2))
  splits = imdb.read(path)
  rows = dict(splits["train"])
  # Keys are the stock builder's: they decide the order.
  assert rows["aclImdb/train/neg/0_1.txt"] == {
    "text": "train neg 0 \u00e9".encode(),
    "label": "neg",
  }
  assert {name: len(split) for name, split in splits.items()} == {
    "train": 4,
    "test": 4,
  }
  folder = write_folder(tmp_path / "x", reviews(2))
  assert dict(imdb.read(folder / "aclImdb")["test"]).keys() == {
    name.removeprefix("aclImdb/") for name, _ in splits["test"]
  }


def test_imdb_refuses_other_counts(tmp_path):
  path = write_tar(tmp_path / "a.tar.gz", reviews(2))
  with pytest.raises(ValueError, match="2 examples.*'neg'.*'train'"):
    imdb.read(path)


@pytest.mark.slow
def test_imdb_reads_the_real_archive(archives):
  path = archives / "aclImdb_v1.tar.gz"
  splits = imdb.read(path)
  assert {name: len(split) for name, split in splits.items()} == {
    "train": 25_000,
    "test": 25_000,
  }
  lengths = [len(example["text"]) for _, example in splits["train"]]
  assert 1_300 < sum(lengths) / 25_000 < 1_350
  assert archive.checksum(path) != imdb.SOURCE.sha256  # Left out: unlabelled.
