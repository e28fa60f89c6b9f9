"""Files and folders as users and their tools leave them."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from jaxformers.foundations.errors import UserError

# Encodings by their marks. The longer marks go first: UTF-32 begins as UTF-16.
BYTE_ORDER_MARKS = {
  codecs.BOM_UTF32_LE: "utf-32",
  codecs.BOM_UTF32_BE: "utf-32",
  codecs.BOM_UTF8: "utf-8-sig",
  codecs.BOM_UTF16_LE: "utf-16",
  codecs.BOM_UTF16_BE: "utf-16",
}
# Files and folders that systems add to a user's, in lower case. So are all
# whose names begin with a dot: .DS_Store, .ipynb_checkpoints, macOS's ._x.
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
  """Returns a text in UTF-8, or in the encoding that its first bytes name.

  Args:
    content: content of a file.
    name: path of the file, for the message.

  Raises:
    UserError: for a text in another encoding, or with zero bytes, which UTF-16
      without a mark has.
  """
  marks = (mark for mark in BYTE_ORDER_MARKS if content.startswith(mark))
  encoding = BYTE_ORDER_MARKS.get(next(marks, b""), "utf-8")
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
  """Returns True for a path, relative to a user's folder, of a system's file.

  Args:
    name: path with slashes; "." and ".." in it are not names.
  """
  parts = [part for part in name.split("/") if part not in ("", ".", "..")]
  return any(part.startswith(".") or part.lower() in JUNK for part in parts)


def walk(folder: Path) -> list[tuple[str, os.DirEntry[str]]]:
  """Returns (name, entry) of all files below a folder, by their names.

  Files of systems are left out; see `is_junk`.
  Links to folders are entered. A link whose target is missing is returned as a
  file: ask `entry.is_file()`. A name that is not UTF-8 has surrogates, which
  `os.fsencode` turns back into bytes.

  Raises:
    UserError: for a link to a folder that holds the link.
  """

  def visit(
    place: str, prefix: str, above: frozenset[tuple[int, int]]
  ) -> Iterator[tuple[str, os.DirEntry[str]]]:
    # A folder that is met again on the way to itself would never end.
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
        if entry.is_dir():
          inner = f"{prefix}{entry.name}/"
          yield from visit(entry.path, inner, above | {identity})
        else:
          yield prefix + entry.name, entry

  files = visit(str(folder), "", frozenset())
  return sorted(files, key=lambda file: file[0].split("/"))
