import numpy as np
import pytest
import tokenizers

from jaxformers import tasks
from jaxformers.data.sets import ag_news, imdb
from tests.data.archives import ag_news as articles
from tests.data.archives import imdb as reviews
from tests.data.archives import write_folder, write_tar


@pytest.fixture
def few(monkeypatch):
  """A few texts of each class, and as many less held out."""
  monkeypatch.setattr(imdb, "PER_LABEL", 10)
  monkeypatch.setattr(ag_news, "PER_LABEL", {"train": 10, "test": 20})
  held = {"imdb": 4, "ag_news": 8, "test_only": 10}
  monkeypatch.setattr(tasks.short, "HELD_OUT", held)


def load(folder, name, protocol="jaxformers", files=None, **options):
  files = (
    files
    or {"imdb": reviews(10), "ag_news": articles({"train": 10, "test": 20})}[
      name
    ]
  )
  path = write_tar(folder / f"{name}.tar.gz", files)
  return tasks.get(
    name,
    data_dir=str(folder / "data"),
    archive=str(path),
    protocol=protocol,
    **{"vocab_size": 60} | options,
  )


@pytest.mark.parametrize(
  ("name", "protocol", "sizes"),
  [
    ("imdb", "jaxformers", (16, 4, 20)),
    ("imdb", "paper", (20, 20, 20)),
    ("ag_news", "jaxformers", (32, 8, 80)),
    ("ag_news", "paper", (40, 80, 80)),
    ("ag_news", "test_only", (60, 10, 10)),
  ],
)
@pytest.mark.slow
def test_short_text_protocols_have_their_splits(
  few, tmp_path, name, protocol, sizes
):
  task = load(tmp_path, name, protocol)
  counts = [len(task.splits[s]) for s in ("train", "validation", "test")]
  assert tuple(counts) == sizes
  assert task.selection == ("test" if protocol == "paper" else "validation")
  assert task.num_classes == {"imdb": 2, "ag_news": 4}[name]
  if protocol != "paper":
    keys = [set(split.keys) for split in task.splits.values()]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
  assert set(task.baselines()) == {"majority class", "bag-of-pieces regression"}


def test_short_text_tokens_are_those_of_the_saved_tokenizer(few, tmp_path):
  task = load(tmp_path, "ag_news", max_len=8)
  tokenizer = tokenizers.Tokenizer.from_str(task.tokenizer_json)
  assert tokenizer.get_vocab_size() == task.vocab_size <= 60
  assert task.vocabulary[0] == "[PAD]"
  want = tokenizer.encode('train title 0 a "quoted" text, 1')
  rows = [task.splits["train"][i].tolist() for i in range(32)]
  rows += [task.splits["validation"][i].tolist() for i in range(8)]
  assert want.ids in rows
  inputs = task.splits["test"].batch(np.arange(3), task.max_len)["inputs"]
  assert inputs.shape == (3, 8)
  assert inputs.min() > 0


def test_short_text_encode_adds_the_special_tokens(few, tmp_path):
  task = load(tmp_path, "ag_news", max_len=12, special_tokens=True)
  ids = task.encode('train title 0 a "quoted" text, 1').tolist()
  rows = [
    *task.splits["train"].batch(np.arange(32), 12)["inputs"].tolist(),
    *task.splits["validation"].batch(np.arange(8), 12)["inputs"].tolist(),
  ]
  assert [*ids, *[0] * (12 - len(ids))] in rows
  assert task.vocabulary[ids[0]] == "[CLS]"
  assert task.vocabulary[task.encode("train title 0", 3)[-1]] == "[SEP]"


def test_short_text_task_uses_a_given_vocabulary(few, tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("[PAD]\n[UNK]\ntrain\nneg\n")
  task = load(tmp_path, "imdb", vocabulary=str(path))
  assert task.vocabulary == ("[PAD]", "[UNK]", "train", "neg")
  other = load(tmp_path, "imdb")
  assert other.vocab_size > 4


def test_ag_news_task_without_train_csv_needs_protocol_test_only(few, tmp_path):
  both = articles({"train": 10, "test": 20})
  folder = write_folder(
    tmp_path / "ag", {"test.csv": both["ag_news_csv/test.csv"]}
  )
  with pytest.raises(ValueError, match="train.csv.*test_only"):
    tasks.get("ag_news", data_dir=str(tmp_path), archive=str(folder))
  task = tasks.get(
    "ag_news",
    data_dir=str(tmp_path),
    archive=str(folder),
    protocol="test_only",
    vocab_size=60,
  )
  assert len(task.splits["train"]) == 60


def test_imdb_task_refuses_an_unknown_protocol(tmp_path):
  with pytest.raises(ValueError, match="protocol.*'lra'.*jaxformers, paper"):
    tasks.get("imdb", data_dir=str(tmp_path), protocol="lra")
