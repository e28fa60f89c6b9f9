"""Folders and archives of text."""

import tarfile

import pytest

from jaxformers.data import text_files


def folder(tmp_path, **files):
  for name, text in files.items():
    path = tmp_path / "texts" / name.replace("__", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return tmp_path / "texts"


def read(path):
  return {
    split: [example["text"].decode() for _, example in rows]
    for split, rows in text_files.read(path).items()
  }


@pytest.mark.parametrize(
  ("name", "split"),
  [
    ("wikitext-103/wiki.train.tokens", "train"),
    ("wiki.valid.tokens", "validation"),
    ("aclImdb/train/pos/test_9.txt", "train"),
    ("data/dev/a.txt", "validation"),
    ("Test.txt", "test"),
    ("aclImdb/imdb.vocab.txt", None),
    ("contest/latest.txt", None),
  ],
)
def test_names_say_the_split(name, split):
  assert text_files.split_of(name) == split


def test_texts_of_a_folder_in_the_order_of_their_names(tmp_path):
  path = folder(
    tmp_path,
    **{
      "train__b.txt": "two",
      "train__a.txt": "one",
      "train__empty.txt": " \n",
      "test.txt": "three",
      "README.md": "not read",
      "train__c.csv": "nor this",
    },
  )
  assert read(path) == {"train": ["one", "two"], "test": ["three"]}
  with tarfile.open(tmp_path / "texts.tar.gz", "w:gz") as tar:
    tar.add(path, "root")
  assert read(tmp_path / "texts.tar.gz") == read(path)


def test_without_names_all_is_for_training(tmp_path):
  path = folder(tmp_path, **{"a.txt": "one", "sub__b.md": "two"})
  assert read(path) == {"train": ["one", "two"]}


def test_long_texts_are_cut_at_lines():
  text = b"aaa\nbb\nc\ndddddd\ne"
  for size in (1, 4, 9, 100):
    parts = list(text_files.pieces(text, size))
    assert b"".join(parts) == text
    assert all(part.endswith(b"\n") for part in parts[:-1])
  assert len(list(text_files.pieces(text, 4))) > 1
  assert list(text_files.pieces(b"no end of line", 3)) == [b"no end of line"]


def test_what_is_no_text(tmp_path):
  path = folder(tmp_path, **{"test.txt": "three"})
  with pytest.raises(ValueError, match="no training text but test"):
    text_files.read(path)
  empty = tmp_path / "empty"
  empty.mkdir()
  with pytest.raises(ValueError, match="no text files at all"):
    text_files.read(empty)


def test_another_folder_is_another_source(tmp_path):
  path = folder(tmp_path, **{"a.txt": "one"})
  first = text_files.source(path).key
  (path / "b.txt").write_text("more")
  assert text_files.source(path).key != first
