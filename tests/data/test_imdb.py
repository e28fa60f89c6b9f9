import dataclasses
import functools
import hashlib
import http.server
import socket
import threading
import time

import numpy as np
import pytest

from jaxformers.data import imdb, packed
from tests.data.test_imdb_builder import write_archive


@pytest.fixture
def few(monkeypatch):
  """Three reviews of each label instead of 12,500."""
  from jaxformers.data import imdb_builder

  monkeypatch.setattr(imdb_builder.JaxformersImdb, "expected", 3)


def test_from_an_archive(tmp_path, few):
  path = write_archive(tmp_path / "mine.tar.gz", 3)
  splits, info = imdb.load(tmp_path / "data", str(path))
  assert info["source"] == "mine.tar.gz"
  assert not info["authors_checksum"]
  for name in ("train", "test"):
    split = splits[name]
    texts = {
      (split[i] - 1).astype(np.uint8).tobytes(): split.labels[i]
      for i in range(6)
    }
    assert texts[f"{name} neg 0 \u00e9".encode()] == 0
    assert texts[f"{name} pos 2 \u00e9".encode()] == 1
  # Another archive is not passed over in silence.
  other = write_archive(tmp_path / "other.tar.gz", 3, "another")
  with pytest.raises(ValueError, match=r"prepared from another.*mine.tar.gz"):
    imdb.load(tmp_path / "data", str(other))
  with pytest.raises(ValueError, match="There is no archive"):
    imdb.load(tmp_path / "data", str(tmp_path / "nowhere.tar.gz"))
  # The second time nothing but the prepared data is needed.
  path.unlink()
  again, _ = imdb.load(tmp_path / "data")
  np.testing.assert_array_equal(again["test"].tokens, splits["test"].tokens)


class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *args):
    pass


def test_by_the_network(tmp_path, few, monkeypatch):
  """tensorflow-datasets downloads, checks the sum, and keeps the archive."""
  from jaxformers.data import imdb_builder

  served = tmp_path / "served"
  served.mkdir()
  path = write_archive(served / imdb.ARCHIVE, 3)
  sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
  handler = functools.partial(Quiet, directory=served)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/{imdb.ARCHIVE}"
    (known,) = imdb_builder.JaxformersImdb.url_infos.values()
    size = path.stat().st_size
    info = dataclasses.replace(known, checksum=sha256, size=size)
    builder = imdb_builder.JaxformersImdb
    monkeypatch.setattr(builder, "url_infos", {url: info})
    monkeypatch.setattr(imdb_builder, "URL", url)
    monkeypatch.setattr(imdb_builder, "SHA256", sha256)
    monkeypatch.setattr(imdb, "HOST", ("127.0.0.1", server.server_port))
    monkeypatch.delenv("JAXFORMERS_DATA_ARCHIVES", raising=False)
    splits, said = imdb.load(tmp_path / "data")
    assert said["source"] == url
    assert said["authors_checksum"]
    assert len(splits["train"]) == len(splits["test"]) == 6
    # Something else under the same address is refused.
    bad = dataclasses.replace(known, checksum="0" * 64, size=size)
    monkeypatch.setattr(builder, "url_infos", {url: bad})
    with pytest.raises(ValueError, match="wrong checksum[\\s\\S]*task.archive"):
      imdb.load(tmp_path / "other")
    assert not (tmp_path / "other" / "packed" / "imdb-bytes-1").exists()
    server.shutdown()


def test_where_archives_are_looked_for(tmp_path, monkeypatch):
  monkeypatch.delenv("JAXFORMERS_DATA_ARCHIVES", raising=False)
  assert imdb.find_archive("", tmp_path) is None
  manual = tmp_path / "downloads" / "manual"
  manual.mkdir(parents=True)
  (manual / imdb.ARCHIVE).touch()
  assert imdb.find_archive("", tmp_path) == manual / imdb.ARCHIVE
  (tmp_path / imdb.ARCHIVE).touch()
  monkeypatch.setenv("JAXFORMERS_DATA_ARCHIVES", str(tmp_path))
  assert imdb.find_archive("", tmp_path) == tmp_path / imdb.ARCHIVE
  with pytest.raises(ValueError, match="There is no archive"):
    imdb.find_archive("nowhere.tar.gz", tmp_path)


def test_without_archive_and_network_both_remedies_are_named_at_once(
  tmp_path, monkeypatch
):
  def refuse(*args, **kwargs):
    raise OSError("no route")

  monkeypatch.delenv("JAXFORMERS_DATA_ARCHIVES", raising=False)
  for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(socket, "create_connection", refuse)
  began = time.monotonic()
  with pytest.raises(ValueError, match=r"with a network.*task.archive=PATH"):
    imdb.load(tmp_path)
  assert time.monotonic() - began < 5


def test_a_truncated_archive_leaves_nothing_behind(tmp_path, few):
  path = write_archive(tmp_path / "a.tar.gz", 3)
  path.write_bytes(path.read_bytes()[:-200])
  with pytest.raises(ValueError, match=r"a.tar.gz cannot be read to its end"):
    imdb.load(tmp_path / "data", str(path))
  assert not (tmp_path / "data" / "packed" / "imdb-bytes-1").exists()
  assert not list((tmp_path / "data").rglob("*.array_record*"))


def test_the_held_out_part_is_a_partition_by_hash():
  rows = [
    np.frombuffer(f"review {i % 90}".encode(), np.uint8) for i in range(100)
  ]
  train = packed.pack(rows, np.arange(100))
  kept, held = imdb.hold_out(train, 20)
  assert (len(kept), len(held)) == (80, 20)
  assert sorted([*kept.labels, *held.labels]) == list(range(100))
  # Doubles (labels that differ by 90) are on one side, but for one at the edge.
  apart = sum((i in held.labels) != (i + 90 in held.labels) for i in range(10))
  assert apart <= 1
  # It depends on the texts, not on their order.
  order = np.random.default_rng(0).permutation(100)
  _, again = imdb.hold_out(packed.select(train, order), 20)
  assert {bytes(held[i]) for i in range(20)} == {
    bytes(again[i]) for i in range(20)
  }


def test_the_real_archive(archives, tmp_path):
  splits, info = imdb.load(tmp_path, str(archives / imdb.ARCHIVE))
  assert info["splits"] == {"train": 25_000, "test": 25_000}
  for split in splits.values():
    assert np.bincount(split.labels).tolist() == [12_500, 12_500]
    assert 1_200 < split.lengths().mean() < 1_400
