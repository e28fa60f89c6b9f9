import dataclasses
import functools
import hashlib
import http.server
import threading

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxformers.data.engine import builder, preparation, sorting, source
from jaxformers.data.sets import imdb
from tests.data.archives import imdb as reviews
from tests.data.archives import write_tar
from tests.data.pictures import EPS, picture


@pytest.fixture
def few(monkeypatch):
  """Three reviews of each label instead of 12,500."""
  monkeypatch.setattr(imdb, "PER_LABEL", 3)


def test_prepare_keeps_all_types_of_features(tmp_path):
  image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
  example = {"image": image, "text": b"\xff\x00", "label": "y"}
  features = {"image": (2, 3, 3), "text": bytes, "label": ("x", "y")}
  toy = source.Source(
    "toy", features, lambda archive: {"train": [("k", example)]}
  )
  builder.prepare(toy, None, tmp_path, tmp_path / "downloads")
  (back,) = list(builder.open_prepared(toy, tmp_path)["train"])
  np.testing.assert_array_equal(back["image"], image)
  assert (back["text"], back["label"]) == (b"\xff\x00", 1)
  # Anybody's tensorflow-datasets reads it, without code of ours.
  other = tfds.builder_from_directory(tmp_path / "toy" / "1.0.0")
  assert len(other.as_data_source("train")) == 1


@pytest.mark.parametrize(
  ("shuffled", "keys"), [(True, ("a", "b", "a")), (False, (0, 1, 0))]
)
def test_prepare_refuses_a_repeated_key(tmp_path, shuffled, keys):
  rows = [(key, {"text": b"x"}) for key in keys]
  toy = source.Source(
    "toy", {"text": bytes}, lambda archive: {"train": rows}, shuffled=shuffled
  )
  path = tmp_path / "toy.tar"
  message = f"toy.tar.*{keys[0]!r} twice"
  with pytest.raises(ValueError, match=message):
    builder.prepare(toy, path, tmp_path, tmp_path / "downloads")
  assert not list(tmp_path.rglob("*.array_record*"))


@pytest.mark.parametrize("shuffled", [True, False])
def test_prepare_sorts_large_splits_on_disk(tmp_path, monkeypatch, shuffled):
  """More than 1 GB is sorted in parts, each of which fits into memory."""
  # Places as of 40,000 examples in a row.
  places = range(0, 40_000, 400)
  rows = [(k, {"text": b"%d" % k}) for k in reversed(places)]
  toy = source.Source(
    "toy", {"text": bytes}, lambda archive: {"train": rows}, shuffled=shuffled
  )
  parts = []
  read = sorting._read
  monkeypatch.setattr(
    sorting, "_read", lambda path: parts.append(path.name) or read(path)
  )
  texts = {}
  for name, max_memory in (("memory", 1 << 20), ("disk", 100)):
    monkeypatch.setattr(sorting, "MAX_MEMORY", max_memory)
    builder.prepare(toy, None, tmp_path / name, tmp_path / "downloads")
    examples = builder.open_prepared(toy, tmp_path / name)["train"]
    texts[name] = [int(example["text"]) for example in examples]
    assert bool(parts) == (name == "disk")
  assert texts["disk"] == texts["memory"]
  assert (texts["disk"] == [*places]) == (not shuffled)
  assert len(parts) == (3 if not shuffled else pytest.approx(95, abs=5))


class StockToy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version("1.0.0")
  name = "toy"
  rows = ()
  is_shuffled = True

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=not self.is_shuffled,
    )

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples() for name in ("train", "test")}

  def _generate_examples(self):
    yield from self.rows


@pytest.mark.parametrize("max_memory", [100, 1 << 30])
@pytest.mark.parametrize("num_shards", [None, 3])
@pytest.mark.parametrize("key", ["a\\%d", "a/%d.txt", int])
def test_files_and_order_are_those_of_a_stock_builder(
  tmp_path, monkeypatch, key, num_shards, max_memory
):
  monkeypatch.setattr(sorting, "MAX_MEMORY", max_memory)
  make_key = int if key is int else key.__mod__
  rows = [(make_key(k), {"text": b"%d" % k}) for k in range(100)]
  monkeypatch.setattr(StockToy, "rows", rows)
  monkeypatch.setattr(StockToy, "is_shuffled", key is not int)
  toy = source.Source(
    "toy",
    {"text": bytes},
    lambda archive: {"train": rows, "test": rows},
    shuffled=key is not int,
  )
  records, splits = [], []
  for name, make in (("ours", builder.builder_class(toy)), ("stock", StockToy)):
    tested = make(data_dir=tmp_path / name, file_format="array_record")
    tested.download_and_prepare(
      download_config=tfds.download.DownloadConfig(num_shards=num_shards)
    )
    folder = tmp_path / name / "toy" / "1.0.0"
    assert not list(folder.glob("*.tmp"))
    splits.append([split.to_proto() for split in tested.info.splits.values()])
    raw = {"text": tfds.decode.SkipDecoding()}
    texts = {
      split: [example["text"] for example in examples]
      for split, examples in tested.as_data_source(decoders=raw).items()
    }
    files = {path.name: path.read_bytes() for path in folder.glob("*record*")}
    assert len(files) == 2 * (num_shards or 1)
    records.append((texts, files))
  assert records[0] == records[1]
  assert splits[0] == splits[1]


def test_a_split_without_examples_is_refused(tmp_path):
  toy = source.Source("toy", {"text": bytes}, lambda archive: {"train": []})
  with pytest.raises(ValueError, match="no example of the split 'train'"):
    builder.prepare(toy, tmp_path / "x", tmp_path, tmp_path / "downloads")
  assert not list(tmp_path.rglob("*.array_record*"))


@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (EPS, "JPEG.*PNG"),
    (picture()[:-30], "truncated"),
    (picture(size=(3, 2)), "3 x 2.*32 x 24"),
  ],
)
def test_open_prepared_refuses_images_it_cannot_decode(
  tmp_path, no_program, content, reason
):
  rows = [(k, {"image": file}) for k, file in enumerate((picture(), content))]
  toy = source.Source(
    "toy", {"image": (24, 32, 3)}, lambda _: {"train": rows}, shuffled=False
  )
  builder.prepare(toy, None, tmp_path, tmp_path / "downloads")
  examples = builder.open_prepared(toy, tmp_path)["train"]
  assert examples[0]["image"].shape == (24, 32, 3)
  with pytest.raises(ValueError, match=f"{tmp_path}.*{reason}"):
    list(examples)


class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *args):
    pass


def test_open_examples_downloads_and_checks_the_archive(
  tmp_path, few, monkeypatch
):
  """tensorflow-datasets downloads, checks the sum, and keeps the archive."""
  served = tmp_path / "served"
  served.mkdir()
  path = write_tar(served / "aclImdb_v1.tar.gz", reviews(3))
  sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
  handler = functools.partial(Quiet, directory=served)
  monkeypatch.delenv("JAXFORMERS_DATA_ARCHIVES", raising=False)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = dataclasses.replace(
      imdb.SOURCE,
      url=f"http://127.0.0.1:{server.server_port}/{path.name}",
      sha256=sha256,
      size=path.stat().st_size,
    )
    examples, info = preparation.open_examples(remote, tmp_path / "data")
    assert (info["source"], info["authors_checksum"]) == (remote.url, True)
    assert len(examples["train"]) == len(examples["test"]) == 6
    # Something else under the same address is refused, and nothing kept.
    bad = dataclasses.replace(remote, sha256="0" * 64)
    with pytest.raises(ValueError, match=r"checksum[\s\S]*task.archive"):
      preparation.open_examples(bad, tmp_path / "other")
    assert not list((tmp_path / "other").rglob("*.array_record*"))
    server.shutdown()


class StockReviews(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version("1.0.0")
  name = "imdb_reviews"
  classes = ("neg", "pos")

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {
          "text": tfds.features.Text(),
          "label": tfds.features.ClassLabel(names=list(self.classes)),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples() for name in ("train", "test")}

  def _generate_examples(self):
    yield "a", {"text": "good", "label": self.classes[1]}


def stock(folder, classes=("neg", "pos"), file_format="array_record"):
  StockReviews.classes = classes
  builder = StockReviews(data_dir=folder, file_format=file_format)
  builder.download_and_prepare()
  return folder / "imdb_reviews" / "1.0.0"


def test_open_examples_reads_a_directory_of_a_stock_builder(tmp_path):
  folder = stock(tmp_path / "stock")
  two = dataclasses.replace(imdb.SOURCE, counts={"train": 1, "test": 1})
  examples, info = preparation.open_examples(
    two, tmp_path / "data", str(folder)
  )
  assert {name: len(split) for name, split in examples.items()} == {
    "train": 1,
    "test": 1,
  }
  assert examples["train"][0] == {"text": b"good", "label": 1}
  assert info["authors_checksum"] is False


def test_open_examples_refuses_another_stock_directory(tmp_path):
  folder = stock(tmp_path / "stock", classes=("bad", "good"))
  with pytest.raises(ValueError, match="'label'.*imdb_reviews"):
    preparation.open_examples(imdb.SOURCE, tmp_path / "data", str(folder))
  right = stock(tmp_path / "right")
  with pytest.raises(ValueError, match=r"\b1 examples.*'train'.*25,000"):
    preparation.open_examples(imdb.SOURCE, tmp_path / "data", str(right))
  text = (folder / "dataset_info.json").read_text()
  (folder / "dataset_info.json").write_text(
    text.replace('"array_record"', '"tfrecord"')
  )
  with pytest.raises(ValueError, match="tfrecord.*array_record"):
    preparation.open_examples(imdb.SOURCE, tmp_path / "data", str(folder))
