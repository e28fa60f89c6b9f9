import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data import imdb
from jaxformers.data.packed import pack


@pytest.fixture
def reviews(monkeypatch):
  """Thirty reviews of 3,000 bytes in place of the archive, five held out."""
  rng = np.random.default_rng(0)

  def split():
    rows = [rng.integers(0, 256, 3_000).astype(np.uint8) for _ in range(30)]
    packed = pack(rows, np.arange(30) % 2)
    return type(packed)(packed.tokens, packed.offsets, packed.labels, shift=1)

  splits = {"train": split(), "test": split()}
  monkeypatch.setattr(imdb, "load", lambda *_: (splits, {"source": "toy"}))
  monkeypatch.setattr(imdb.hold_out, "__defaults__", (5,))
  return splits


def test_protocols(reviews, tmp_path):
  held, lra, sky = (
    tasks.get("text", data_dir=str(tmp_path), protocol=p)
    for p in ("holdout", "lra", "skyformer")
  )
  assert (held.max_len, lra.max_len, sky.max_len) == (4_000, 1_000, 4_000)
  assert len(held.splits["train"]), len(held.splits["validation"]) == (25, 5)
  assert held.selection == "validation"
  for task in (lra, sky):
    assert task.selection == "test"
    assert task.splits["validation"] is task.splits["test"]
    assert len(task.splits["train"]) == 30
  assert held.splits["test"] is reviews["test"]


def test_ids_are_bytes_plus_one(reviews, tmp_path):
  task = tasks.get("text", data_dir=str(tmp_path), max_len=7)
  assert (task.max_len, task.vocab_size) == (7, 257)
  batch = task.splits["test"].batch(np.arange(30), 7)
  assert batch["inputs"].shape == (30, 7)
  assert batch["inputs"].min() >= 1
  assert batch["inputs"].max() <= 256
  raw = reviews["test"].tokens[:7].astype(int)
  np.testing.assert_array_equal(batch["inputs"][0], raw + 1)
  assert task.splits["validation"].shift == 1


def test_unknown_protocol(tmp_path):
  with pytest.raises(ValueError, match="protocol of text 's4'.*holdout, lra"):
    tasks.get("text", data_dir=str(tmp_path), protocol="s4")


def test_the_byte_histogram_on_all_real_reviews(archives, tmp_path):
  """66.4 %: more than every model of the papers' tables."""
  task = tasks.get(
    "text",
    data_dir=str(tmp_path),
    archive=str(archives / imdb.ARCHIVE),
    protocol="lra",
  )
  scores = task.baselines()
  assert scores["majority class"] == 0.5
  assert scores["byte-histogram regression"] == pytest.approx(0.664, abs=0.004)
