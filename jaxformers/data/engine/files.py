"""Reads text files and walks folders that users and their tools have made."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from jaxformers.foundations.errors import UserError

# Encodings by byte-order mark. UTF-32 comes first: its little-endian mark
# begins with the mark of UTF-16.
BYTE_ORDER_MARKS = {
  codecs.BOM_UTF32_LE: "utf-32",
  codecs.BOM_UTF32_BE: "utf-32",
  codecs.BOM_UTF8: "utf-8-sig",
  codecs.BOM_UTF16_LE: "utf-16",
  codecs.BOM_UTF16_BE: "utf-16",
}
# Lower-case names of files and folders that operating systems add. `is_junk`
# also matches every name that begins with a dot: .DS_Store, .ipynb_checkpoints,
# macOS's ._x.
JUNK = {
  "__macosx",
  "thumbs.db",
  "ehthumbs.db",
  "desktop.ini",
  "icon\r",
  "@eadir",
  "$recycle.bin",
  "system volume information",
  "lost+found",
}


def decode_text(content: bytes, name: str) -> str:
  """Decodes a text by its byte-order mark, or as UTF-8 if it has none.

  Args:
    content: content of a file.
    name: path of the file, for the message.

  Raises:
    UserError: for a text in another encoding, or one with zero characters, as
      in UTF-16 without a mark.
  """
  # Choose the encoding by the first bytes.
  marks = (mark for mark in BYTE_ORDER_MARKS if content.startswith(mark))
  encoding = BYTE_ORDER_MARKS.get(next(marks, b""), "utf-8")
  # Decode, and find the first place that is not text.
  try:
    text = content.decode(encoding)
    place = text.find("\0")
  except UnicodeDecodeError as error:
    text, place = "", error.start
  if place >= 0:
    raise UserError(
      f"{name} is not text in {encoding.upper()} (place {place:,}): save it as "
      "UTF-8, or as UTF-16 with a byte-order mark."
    )
  return text


def is_junk(name: str) -> bool:
  """Returns True for a file that an operating system or a tool has added.

  Args:
    name: path with slashes, relative to the user's folder; "." and ".." in the
      path are ignored.
  """
  parts = [part for part in name.split("/") if part not in ("", ".", "..")]
  return any(part.startswith(".") or part.lower() in JUNK for part in parts)


def walk(folder: Path) -> list[tuple[str, os.DirEntry[str]]]:
  """Returns (name, entry) of all files below a folder, sorted by name.

  Skips files that systems add; see `is_junk`. Follows links to folders. A link
  whose target is missing is returned too: its `entry.is_file()` is False. A
  name that is not UTF-8 has surrogates, which `os.fsencode` turns back into
  bytes.

  Raises:
    UserError: for a link to a folder that holds the link.
  """

  def visit(
    place: str, prefix: str, above: frozenset[tuple[int, int]]
  ) -> Iterator[tuple[str, os.DirEntry[str]]]:
    # Refuse a folder that contains itself: the walk would never end.
    status = os.stat(place)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
      raise UserError(
        f"{place} leads by a link back to {os.path.realpath(place)}, a folder "
        "that holds it: remove the link."
      )
    with os.scandir(place) as entries:
      for entry in entries:
        if is_junk(entry.name):
          continue
        # Descend into folders, and yield all other entries.
        if entry.is_dir():
          inner = f"{prefix}{entry.name}/"
          yield from visit(entry.path, inner, above | {identity})
        else:
          yield prefix + entry.name, entry

  files = visit(str(folder), "", frozenset())
  return sorted(files, key=lambda file: file[0].split("/"))
