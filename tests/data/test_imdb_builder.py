import io
import tarfile

import pytest

from jaxformers.data import imdb_builder


def write_archive(path, count, readme="read me"):
  """A small archive of the layout of the real one, with a stranger in it."""
  with tarfile.open(path, "w:gz") as tar:

    def add(name, text):
      member = tarfile.TarInfo(f"aclImdb/{name}")
      member.size = len(text)
      tar.addfile(member, io.BytesIO(text))

    add("README", readme.encode())
    add("train/unsup/0_0.txt", b"no label")
    for split in ("train", "test"):
      for label in ("neg", "pos"):
        for i in range(count):
          text = f"{split} {label} {i} \u00e9".encode()
          add(f"{split}/{label}/{i}_1.txt", text)
  return path


def test_reviews_are_read_and_strangers_passed_over(tmp_path):
  path = write_archive(tmp_path / "a.tar.gz", 2)
  rows = list(imdb_builder.read_reviews(path, 2))
  assert len(rows) == 8
  assert ("train", "neg", "0_1.txt", "train neg 0 \u00e9".encode()) in rows


def test_other_counts_are_refused(tmp_path):
  path = write_archive(tmp_path / "a.tar.gz", 2)
  with pytest.raises(ValueError, match="holds 2 reviews under train/neg"):
    list(imdb_builder.read_reviews(path, 3))


@pytest.mark.parametrize(
  "content", [b"", b"no gzip at all", b"\x1f\x8b\x08junk"]
)
def test_what_is_no_archive_is_refused(tmp_path, content):
  path = tmp_path / "a.tar.gz"
  path.write_bytes(content)
  with pytest.raises(ValueError, match="cannot be read to its end"):
    list(imdb_builder.read_reviews(path, 3))


def test_the_download_is_checked_against_the_authors_checksum():
  (info,) = imdb_builder.JaxformersImdb.url_infos.values()
  assert info.checksum == imdb_builder.SHA256
  assert info.size == imdb_builder.SIZE
