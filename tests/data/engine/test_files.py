"""Folders as tools leave them, and the encodings of texts."""

import os

import pytest

from jaxformers.data.engine import files
from tests.assertions import assert_all
from tests.data.archives import write_folder

JUNK = {
  "train/a.txt": False,
  "./a/../b.txt": False,
  "a.b/c..txt": False,
  "._a.txt": True,
  ".ipynb_checkpoints/a.txt": True,
  "x/__MACOSX/a.txt": True,
  "x/Thumbs.db": True,
  "Desktop.ini": True,
  "./x/.DS_Store": True,
}


def test_is_junk_recognises_files_of_operating_systems():
  def check(name, is_junk):
    assert files.is_junk(name) == is_junk

  assert_all(check, JUNK.items())


def test_walk_is_in_the_order_of_paths(tmp_path):
  names = ["a.txt", "a/b.txt", "a-b/c", "b/d", ".hidden", "a/.x/y"]
  folder = write_folder(tmp_path / "x", dict.fromkeys(names, b"x"))
  (folder / "b" / "link").symlink_to(folder / "a-b")
  walked = [name for name, entry in files.walk(folder) if entry.is_file()]
  assert walked == ["a/b.txt", "a-b/c", "a.txt", "b/d", "b/link/c"]
  # Python's own walk has the same order, but enters no links.
  paths = sorted(path for path in folder.rglob("*") if path.is_file())
  plain = [path.relative_to(folder).as_posix() for path in paths]
  plain = [name for name in plain if not files.is_junk(name)]
  assert [name for name in walked if "link" not in name] == plain


def test_walk_refuses_links_in_a_circle(tmp_path):
  folder = write_folder(tmp_path / "x", {"a/b.txt": b"x"})
  os.symlink("..", folder / "a" / "up")
  with pytest.raises(ValueError, match="a/up.*link.*/x"):
    files.walk(folder)


def test_decode_text_decodes_unicode_or_refuses():
  text = "na\u00efve \U0001f600\n"
  for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
    assert files.decode_text(text.encode(encoding), "x") == text
  assert files.decode_text(b"", "x") == ""
  for encoding in ("cp1252", "utf-16-le", "utf-16-be", "utf-32-le"):
    content = "na\u00efve".encode(encoding)
    with pytest.raises(ValueError, match="x.txt.*UTF-8.*place"):
      files.decode_text(content, "x.txt")
  with pytest.raises(ValueError, match="x.txt.*UTF-16.*place"):
    files.decode_text(b"\xff\xfea", "x.txt")
