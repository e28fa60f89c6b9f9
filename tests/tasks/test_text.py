import dataclasses

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.sets import imdb
from tests.data.archives import imdb as reviews
from tests.data.archives import write_tar


@pytest.fixture
def few(monkeypatch, tmp_path):
  """Twenty reviews in each split, five held out; a function that opens them."""
  monkeypatch.setattr(imdb, "PER_LABEL", 10)
  protocols = dict(tasks.text.PROTOCOLS)
  protocol = dataclasses.replace(protocols["jaxformers"], held_out=5)
  monkeypatch.setattr(
    tasks.text, "PROTOCOLS", protocols | {"jaxformers": protocol}
  )
  path = write_tar(tmp_path / "a.tar.gz", reviews(10))

  def load(**options):
    return tasks.get(
      "text", data_dir=str(tmp_path / "data"), archive=str(path), **options
    )

  return load


def test_text_protocols_have_their_lengths(few):
  ours, lra, sky, s4 = (
    few(protocol=p) for p in ("jaxformers", "lra", "skyformer", "s4")
  )
  lengths = [(t.max_len, t.padded_len) for t in (ours, lra, sky, s4)]
  assert lengths == [(4_000, 0), (1_000, 0), (4_000, 4_096), (4_096, 0)]
  assert (len(ours.splits["train"]), len(ours.splits["validation"])) == (15, 5)
  assert ours.selection == "validation"
  for task in (lra, sky, s4):
    assert task.selection == "test"
    assert task.splits["validation"] is task.splits["test"]
    assert len(task.splits["train"]) == 20


def test_text_ids_are_bytes_plus_one(few):
  task = few(max_len=7)
  assert (task.max_len, task.vocab_size) == (7, 257)
  texts = {
    (task.splits["test"][i] - 1).astype(np.uint8).tobytes() for i in range(20)
  }
  assert "test neg 3 \u00e9".encode() in texts
  inputs = task.splits["test"].batch(np.arange(20), 7)["inputs"]
  assert inputs.shape == (20, 7)
  assert 1 <= inputs.min() <= inputs.max() <= 256


def test_text_s4_vocabulary_has_characters(few):
  task = few(protocol="s4")
  assert task.vocabulary[:4] == ("<pad>", "<unk>", "<eos>", " ")
  assert "\u00e9" in task.vocabulary  # In every text, so at least 15 times.
  batch = task.splits["test"].batch(np.arange(20), 30)["inputs"]
  assert ((batch == 2).sum(1) == 1).all()
  row = task.splits["test"][0]
  assert batch[0, len(row)] == 2


@pytest.mark.parametrize("protocol", ["jaxformers", "s4"])
def test_text_encode_reads_a_text_as_the_task(few, protocol):
  task = few(protocol=protocol)
  split = task.splits["test"]
  rows = split.batch(np.arange(len(split)), 20)["inputs"].tolist()
  for length, cut in ((0, None), (5, 5)):
    ids = task.encode("test neg 3 \u00e9", length).tolist()
    assert len(ids) == (cut or len(ids))
    if cut is None:
      assert [*ids, *[0] * (20 - len(ids))] in rows
    elif protocol == "s4":
      assert ids[-1] == 2
  assert (1 in task.encode("\u4e00")) == (protocol == "s4")


def test_text_task_holds_out_the_same_reviews_for_all_tokens(few, tmp_path):
  held = few().splits["validation"].keys.tolist()
  assert few(max_len=3).splits["validation"].keys.tolist() == held


def test_text_task_refuses_an_unknown_protocol(tmp_path):
  with pytest.raises(ValueError, match="protocol.*'s5'.*jaxformers, lra"):
    tasks.get("text", data_dir=str(tmp_path), protocol="s5")


@pytest.mark.long
def test_text_byte_histogram_baseline_on_all_real_reviews(archives, prepared):
  """66.4 %: more than every model of the papers' tables."""
  task = tasks.get(
    "text",
    data_dir=str(prepared),
    archive=str(archives / "aclImdb_v1.tar.gz"),
    protocol="lra",
  )
  scores = task.baselines()
  assert scores["majority class"] == 0.5
  assert scores["histogram regression"] == pytest.approx(0.664, abs=0.004)
