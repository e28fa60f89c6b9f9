"""The next token of a text."""

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxformers import tasks
from jaxformers.tasks import language

WORDS = {"train": "a b a b a c\n" * 40, "valid": "a b\n" * 9, "test": "a b d\n"}


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "text").mkdir()
  for name, text in WORDS.items():
    (tmp_path / "text" / f"{name}.txt").write_text(text)
  return tmp_path / "text"


def load(folder, tmp_path, **options):
  chosen = {"tokens": "words", "vocab_size": 0, "max_len": 4} | options
  return tasks.get(
    "language", data_dir=str(tmp_path / "data"), archive=str(folder), **chosen
  )


def test_language_task_reads_words_of_a_folder(folder, tmp_path):
  task = load(folder, tmp_path)
  assert task.vocabulary == ("<pad>", "a", "b", "<eos>", "c", "<unk>")
  assert len(task.splits["train"].tokens) == 280
  test = task.splits["test"].batch(np.array([0]))
  assert test["inputs"].tolist() == [[1, 2, 5, 0]]
  assert test["targets"].tolist() == [[2, 5, 3, 0]]
  assert task.sizes()["objective"] == "language_model"
  assert task.description()["length"] == 4
  dense = load(folder, tmp_path, stride=1)
  assert (dense.splits["test"].stride, dense.splits["validation"].stride) == (
    1,
    4,
  )


@pytest.mark.parametrize("tokens", ["byte_pairs", "bytes"])
def test_language_task_reads_any_text(folder, tmp_path, tokens):
  task = load(folder, tmp_path, tokens=tokens, vocab_size=262)
  ids = task.splits["test"].tokens + task.splits["test"].shift
  assert ids.min() >= 1
  assert ids.max() < task.vocab_size
  assert bool(task.tokenizer_json) == (tokens == "byte_pairs")
  if tokens == "bytes":
    assert bytes((ids - 1).astype(np.uint8)) == WORDS["test"].encode()


def test_language_task_reads_texts_with_the_tokenizer_of_gpt2(folder, tmp_path):
  gpt2 = Path(__file__).parents[1] / "models" / "pretrained" / "gpt2"
  task = load(folder, tmp_path, tokens="byte_pairs", vocabulary=str(gpt2))
  assert (task.vocab_size, task.vocabulary[280]) == (281, "<|endoftext|>")
  stream = np.asarray(task.splits["test"].tokens)
  np.testing.assert_array_equal(stream[:-1], task.encode(WORDS["test"], 99))
  assert stream[-1] == 280  # Ends a text of the stream, but not of a user.
  assert task.inputs.decode(stream) == WORDS["test"]
  texts = [*WORDS.values()]
  given = language.from_texts(texts, texts, vocabulary=str(gpt2), max_len=4)
  assert given.vocabulary == task.vocabulary
  with pytest.raises(ValueError, match="vocabulary=.*tokens='words'"):
    load(folder, tmp_path, vocabulary=str(gpt2))


@pytest.mark.parametrize("tokens", ["words", "byte_pairs", "bytes"])
def test_language_encode_reads_a_text_as_the_stream(folder, tmp_path, tokens):
  task = load(
    folder, tmp_path, tokens=tokens, vocab_size=262 * (tokens != "words")
  )
  split = task.splits["test"]
  np.testing.assert_array_equal(
    task.encode(WORDS["test"], 99), np.asarray(split.tokens) + split.shift
  )
  if len(split.tokens) > 4:
    with pytest.warns(UserWarning, match="is cut to 4"):
      assert len(task.encode(WORDS["test"])) == 4
  else:
    assert len(task.encode(WORDS["test"])) == 4


def test_language_baselines_are_unigram_and_bigram_perplexity(folder, tmp_path):
  task = load(folder, tmp_path)
  # a, b, <eos>, c, <unk>: one added to each.
  p = np.array([121, 81, 41, 41, 1]) / 285
  alone = math.exp(-np.log(p[[1, 4, 2]]).mean())
  scores = task.baselines()
  assert scores["unigram"] == pytest.approx(alone)
  # After a: b 80 times and c 40 times. After b: a. After <unk>: never seen.
  pairs = [(80 + 2 * p[1]) / 122, (0 + 1 * p[4]) / 81, p[2]]
  want = math.exp(-np.log(pairs).mean())
  assert scores["bigram"] == pytest.approx(want)


def test_language_task_holds_out_missing_splits_by_text(tmp_path):
  (tmp_path / "text").mkdir()
  for k in range(30):
    (tmp_path / "text" / f"{k}.txt").write_text(f"text {k}\n")
  task = load(tmp_path / "text", tmp_path)
  sizes = {name: len(s.tokens) for name, s in task.splits.items()}
  assert sizes == {"train": 72, "validation": 9, "test": 9}
  # Words of what is held out are not in the vocabulary.
  assert len(task.vocabulary) == 4 + 24
  unknown = task.vocabulary.index("<unk>")
  for name in ("validation", "test"):
    assert (task.splits[name].tokens == unknown).sum() == 3


def test_language_task_refuses_unreadable_archives(folder, tmp_path):
  with pytest.raises(ValueError, match="text.*--archive"):
    tasks.get("language", data_dir=str(tmp_path))
  with pytest.raises(ValueError, match=f"{tmp_path}/nowhere"):
    load(tmp_path / "nowhere", tmp_path)
  with pytest.raises(ValueError, match=r"'letters'.*byte_pairs"):
    load(folder, tmp_path, tokens="letters")
  with pytest.raises(ValueError, match="stride=9.*1.*4"):
    load(folder, tmp_path, stride=9)
  with pytest.raises(ValueError, match="max_len=0"):
    load(folder, tmp_path, max_len=0)


class Pages(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A stock set of texts, with a split that no model is trained on."""

  VERSION = tfds.core.Version("1.0.0")
  names = ("text", "title")

  def _info(self):
    features = {name: tfds.features.Text() for name in self.names}
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(features)
    )

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples(name) for name in (*SPLITS, "more")}

  def _generate_examples(self, split):
    for k in range(5):
      example = {name: f"{split} {name} {k}" for name in self.names}
      yield k, example


SPLITS = ("train", "validation", "test")


def test_language_task_reads_prepared_tensorflow_datasets(tmp_path, capsys):
  builder = Pages(data_dir=tmp_path / "sets", file_format="array_record")
  builder.download_and_prepare()
  folder = tmp_path / "sets" / "pages" / "1.0.0"
  task = load(folder, tmp_path, max_len=8)
  for name in SPLITS:
    words = [task.vocabulary[k] for k in task.splits[name].tokens]
    assert "title" not in words
    assert words.count("<eos>") == 5
  assert "train" in task.vocabulary
  assert "more" not in task.vocabulary
  assert "more/000000000.txt" in capsys.readouterr().err
  # A second time from what was packed.
  again = load(folder, tmp_path, max_len=8)
  assert again.description() == task.description()


def test_language_task_refuses_a_prepared_set_of_several_texts(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(Pages, "names", ("title", "body"))
  builder = Pages(data_dir=tmp_path / "sets", file_format="array_record")
  builder.download_and_prepare()
  with pytest.raises(ValueError, match="pages.*(body|title), (body|title)"):
    load(tmp_path / "sets" / "pages" / "1.0.0", tmp_path)


TEXTS = [f"{k % 7} {k % 5} film\n" for k in range(30)]


@pytest.mark.parametrize("tokens", ["words", "byte_pairs", "bytes"])
def test_from_texts_reads_as_a_folder_does(tokens, tmp_path):
  splits = {"train": TEXTS[:20], "validation": TEXTS[20:25], "test": TEXTS[25:]}
  for name, texts in splits.items():
    folder = tmp_path / "text" / name
    folder.mkdir(parents=True)
    for k, text in enumerate(texts):
      (folder / f"{k:02d}.txt").write_text(text)
  options = {"tokens": tokens, "vocab_size": 262, "max_len": 8}
  ours = language.from_texts(*splits.values(), **options)
  theirs = load(tmp_path / "text", tmp_path, **options)
  assert ours.vocabulary == theirs.vocabulary
  assert ours.description()["data"] == theirs.description()["data"]
  assert ours.selection == "validation"
  assert ours.inputs.batch(["1 film"]).shape[0] == 1


def test_from_texts_holds_out_a_tenth():
  task = language.from_texts([*TEXTS, "half \ud83d"], tokens="bytes")
  task = language.from_texts(TEXTS, tokens="bytes")
  counts = [len(task.splits[n].tokens) for n in ("train", "validation", "test")]
  assert sum(counts[:2]) == sum(map(len, TEXTS))
  assert counts[0] > 8 * counts[1] > 0
  assert counts[1] == counts[2]
  assert task.selection == "test"


@pytest.mark.parametrize("different", [10, 150])
def test_from_texts_holds_out_a_tenth_of_texts_with_copies(different):
  texts = [f"text {k % different}\n" for k in range(1_000)]
  splits = language.from_texts(texts, tokens="bytes").splits
  held, rest = (len(splits[n].tokens) for n in ("validation", "train"))
  assert 0.05 < held / (held + rest) < 0.15


@pytest.mark.parametrize(
  ("texts", "message"),
  [
    ("one text", r"\b1 different texts.*validation="),
    ((["a"], ["b"]), r"\['a'\].*list.*labels"),
    ([""] * 20, "train has no text"),
    (["a"] * 20, "1 different texts.*validation="),
  ],
)
def test_from_texts_refuses_what_is_no_text(texts, message):
  with pytest.raises(ValueError, match=message):
    language.from_texts(texts)
