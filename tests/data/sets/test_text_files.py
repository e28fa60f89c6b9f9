"""Folders and archives of text."""

import bz2
import gzip
import lzma
import os
import tarfile
import zipfile

import pytest

from jaxformers.data.sets import text_files
from tests.assertions import assert_all


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


SPLITS = {
  "wikitext-103/wiki.train.tokens": "train",
  "wiki.valid.tokens": "validation",
  "aclImdb/train/pos/test_9.txt": "train",
  "data/dev/a.txt": "validation",
  "Test.txt": "test",
  "aclImdb/imdb.vocab.txt": None,
  "contest/latest.txt": None,
  "the-train-to-york.txt": None,
  "test-of-time.txt": None,
  "en_test-00001-of-00005.txt": "test",
  "corpus.train.02.txt": "train",
  "train.en.txt": "train",
  "test-de.txt": "test",
  "valid.de-en.en.txt": "validation",
  "wiki.test.en_US.txt": "test",
  "test_data.txt": "test",
  "wiki.train.clean.txt": "train",
  "TRAIN.TXT": "train",
  "en.txt": None,
  "train_test.txt": "test",
}


def test_split_of_reads_the_split_from_names():
  def check(name, split):
    assert text_files.split_of(name) == split

  assert_all(check, SPLITS.items())


def test_text_files_are_read_in_the_order_of_names(tmp_path, capsys):
  path = folder(
    tmp_path,
    **{
      "train__b.txt": "two",
      "train__a.txt": "one",
      "train__empty.txt": " \n",
      "test.txt": "three",
      "valid.txt": "four",
      "README.md": "not read",
      "train__urls_pos.txt": "nor this",
      "train__c.csv": "nor this",
    },
  )
  assert read(path) == {
    "train": ["one", "two"],
    "test": ["three"],
    "validation": ["four"],
  }
  printed = capsys.readouterr().err
  assert "2 train" in printed
  assert "they name no split: README.md." in printed
  with tarfile.open(tmp_path / "texts.tar.gz", "w:gz") as tar:
    tar.add(path, "root")
  assert read(tmp_path / "texts.tar.gz") == read(path)


def test_text_files_without_split_names_are_training_texts(tmp_path):
  files = {f"{'sub__' * (k % 2)}{k}.md": f"text {k}" for k in range(25)}
  files["twice.txt"] = "text 3"
  splits = read(folder(tmp_path, **files))
  assert {name: len(texts) for name, texts in splits.items()} == {
    "train": 22,
    "validation": 2,
    "test": 2,
  }
  everything = [text for texts in splits.values() for text in texts]
  assert sorted(everything) == sorted(files.values())
  again = read(folder(tmp_path, **{"another.txt": "text 99"}))
  moved = {*splits["train"]} & {*again["validation"], *again["test"]}
  assert len(moved) <= 2  # By their hashes, not by chance.


def test_text_files_refuse_one_text_without_validation(tmp_path):
  path = folder(tmp_path, **{"train.txt": "one"})
  with pytest.raises(ValueError, match=r"\b1 training text.*validation.txt"):
    text_files.read(path)
  folder(tmp_path, **{"valid.txt": "two"})
  with pytest.raises(ValueError, match=r"\b1 training text.*test.txt"):
    text_files.read(path)


def test_pieces_cuts_long_texts_at_lines():
  text = b"aaa\nbb\nc\ndddddd\ne"
  for size in (1, 4, 9, 100):
    parts = list(text_files.pieces(text, size))
    assert b"".join(parts) == text
    assert all(part.endswith(b"\n") for part in parts[:-1])
  assert len(list(text_files.pieces(text, 4))) > 1
  assert list(text_files.pieces(b"no end of line", 3)) == [b"no end of line"]


def test_text_files_refuse_folders_without_training_text(tmp_path):
  path = folder(tmp_path, **{"test.txt": "three"})
  with pytest.raises(ValueError, match=r"texts.*training text.*\.txt"):
    text_files.read(path)
  empty = tmp_path / "empty"
  empty.mkdir()
  with pytest.raises(ValueError, match="empty.*text files"):
    text_files.read(empty)


def test_text_files_source_key_depends_on_the_folder(tmp_path):
  path = folder(tmp_path, **{"a.txt": "one"})
  first = text_files.source(path).key
  (path / "b.txt").write_text("more")
  assert text_files.source(path).key != first


PLAIN = {"train.txt": "a", "valid.txt": "b", "test.txt": "c"}
TEXT = "one two na\u00efve\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_text_files_detect_encodings_by_byte_order_marks(tmp_path, encoding):
  path = folder(
    tmp_path, **{"train.txt": "a", "valid.txt": "b", "test.txt": ""}
  )
  (path / "test.txt").write_bytes(TEXT.encode(encoding))
  assert read(path)["test"] == [TEXT]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le", "utf-16-be"])
def test_text_files_refuse_other_encodings(tmp_path, encoding):
  path = folder(
    tmp_path, **{"train.txt": "a", "valid.txt": "b", "test.txt": ""}
  )
  (path / "test.txt").write_bytes(TEXT.encode(encoding))
  with pytest.raises(ValueError, match="texts/test.txt.*UTF-8"):
    read(path)
  with pytest.raises(ValueError, match="/test.txt.*UTF-8"):
    read(path / "test.txt")


@pytest.mark.parametrize("pack", [False, True])
def test_text_files_skip_files_of_operating_systems(tmp_path, pack):
  names = ("train.txt", "valid.txt", "test.txt")
  path = folder(tmp_path, **dict.fromkeys(names, TEXT))
  plain = text_files.source(path).key
  junk = ["._train.txt", "__MACOSX__train.txt", ".ipynb_checkpoints__test.txt"]
  folder(tmp_path, **dict.fromkeys([*junk, "train__Thumbs.db"], "\0\5"))
  assert text_files.source(path).key == plain
  if pack:
    with tarfile.open(tmp_path / "texts.tar", "w") as tar:
      tar.add(path, ".")
    path = tmp_path / "texts.tar"
  assert read(path) == {
    split: [TEXT] for split in ("train", "validation", "test")
  }


def test_text_files_follow_links(tmp_path):
  path = folder(
    tmp_path, **{"train__a.txt": "a", "valid.txt": "b", "test.txt": "c"}
  )
  before = text_files.source(path).key
  other = tmp_path / "other"
  other.mkdir()
  (other / "b.txt").write_text("linked")
  (path / "train" / "more").symlink_to(other)
  assert read(path)["train"] == ["a", "linked"]
  after = text_files.source(path).key
  (other / "b.txt").write_text("linked more")
  assert len({before, after, text_files.source(path).key}) == 3
  (other / "c.txt").symlink_to(tmp_path / "nowhere")
  with pytest.raises(ValueError, match=r"more/c\.txt.*link"):
    read(path)
  (other / "c.txt").unlink()
  (other / "up").symlink_to(path)
  with pytest.raises(ValueError, match="more/up.*link.*texts"):
    read(path)


def test_text_files_accept_names_that_are_not_utf8(tmp_path):
  path = folder(
    tmp_path, **{"train.txt": "a", "valid.txt": "b", "test.txt": "c"}
  )
  before = text_files.source(path).key
  name = os.fsencode(path) + b"/caf\xe9.train.txt"
  with open(name, "w") as file:
    file.write("d")
  assert text_files.source(path).key != before
  assert sorted(read(path)["train"]) == ["a", "d"]


@pytest.mark.parametrize(
  ("ending", "module"), [("gz", gzip), ("BZ2", bz2), ("xz", lzma)]
)
def test_decoded_reads_one_compressed_text_and_a_folder_refuses_it(
  tmp_path, ending, module
):
  path = tmp_path / f"texts.txt.{ending}"
  path.write_bytes(module.compress(TEXT.encode() * 3))
  (_, content), *more = text_files._decoded(path)
  assert content.decode() == TEXT * 3 and not more
  with pytest.raises(ValueError, match=f"texts.txt.{ending}.*unpack"):
    read(tmp_path)
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(ValueError, match=f"texts.txt.{ending}.*truncated"):
    list(text_files._decoded(path))


def test_text_files_refuse_a_compressed_file_that_is_no_text(tmp_path):
  path = tmp_path / "texts.gz"
  path.write_bytes(gzip.compress(TEXT.encode() * 99))
  with pytest.raises(ValueError, match=r"texts\.gz.*compressed 'texts'"):
    read(path)


def test_text_files_refuse_a_zip_archive(tmp_path):
  with zipfile.ZipFile(tmp_path / "texts.zip", "w") as file:
    file.writestr("train.txt", TEXT)
  with pytest.raises(ValueError, match=r"texts\.zip.*unpack"):
    read(tmp_path / "texts.zip")
