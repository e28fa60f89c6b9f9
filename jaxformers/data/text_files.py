"""Any folder or archive of text files, as the splits of a language model.

What stands in a folder called train, valid, validation, dev or test belongs to
that split, and elsewhere what has such a word in its own name; without any such
name all of it is train. So are read WikiText as its authors ship it
(wiki.train.tokens), IMDb's archive, and a folder of one's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from jaxformers.data import archive as archives
from jaxformers.data.source import Keyed, Source

SPLITS = {
  "train": "train",
  "training": "train",
  "valid": "validation",
  "validation": "validation",
  "dev": "validation",
  "test": "test",
}
ENDINGS = (".txt", ".tokens", ".raw", ".md")
MAX_BYTES = 1 << 33  # They are held in memory, to be put in order.
PIECE = 1 << 20  # Longer texts are cut at the end of a line.


def split_of(name: str) -> str | None:
  """The split that a path names: its innermost folder, else the file itself."""
  *folders, file = name.lower().split("/")
  words = [*reversed(folders), *re.split(r"[^a-z]+", file)]
  return next((SPLITS[word] for word in words if word in SPLITS), None)


def pieces(text: bytes, size: int = PIECE) -> Iterator[bytes]:
  """A text in parts of about `size` bytes, all but the last of whole lines."""
  start = 0
  while len(text) - start > size:
    end = text.find(b"\n", start + size)
    if end < 0:
      break
    yield text[start : end + 1]
    start = end + 1
  if start < len(text):
    yield text[start:]


def read(path: Path | None) -> dict[str, Iterator[Keyed]]:
  """The texts of every split, in the order of their names: `text`, bytes.

  Raises:
    ValueError: for an archive without text files, or without training text.
  """
  texts = {
    name: content
    for name, content in archives.members(
      path, max_bytes=MAX_BYTES, wanted=lambda name: name.endswith(ENDINGS)
    )
    if content.strip()
  }
  chosen = {name: split_of(name) for name in sorted(texts)}
  if not any(chosen.values()):
    chosen = dict.fromkeys(chosen, "train")
  splits: dict[str, list[str]] = {}
  for name, split in chosen.items():
    if split is not None:
      splits.setdefault(split, []).append(name)
  if "train" not in splits:
    found = ", ".join(sorted(splits)) or "no text files at all"
    raise ValueError(
      f"{path} holds no training text but {found}: name a file or a folder of "
      f"{'/'.join(ENDINGS)} files train, or give them no split's name."
    )

  def rows(names: list[str]) -> Iterator[Keyed]:
    number = 0
    for name in names:
      for piece in pieces(texts[name]):
        yield number, {"text": piece}
        number += 1

  return {split: rows(names) for split, names in splits.items()}


def source(path: Path) -> Source:
  """The source of one folder or archive, known by its content."""
  digest = archives.checksum(path).rpartition("-")[2]
  return Source(
    name="text_files",
    features={"text": bytes},
    read=read,
    tag=digest[:12],
    archives=(path.name,),
    local_only="is read from a folder or archive of text files",
    shuffled=False,
    own=True,
  )
