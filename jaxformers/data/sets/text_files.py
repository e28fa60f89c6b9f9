"""Reads folders and archives of text files as the splits of a language model.

The path of a file names its split. The innermost folder named train, valid,
validation, dev or test counts; without such a folder, the name of the file
counts: train.txt, test-00001.txt, wiki.train.tokens, train.en.txt,
test_data.txt. If no file names a split, all files are train. If only some files
do, the others are skipped with a message. If the validation or test split is
missing, a tenth of the training texts is held out for it, by the hashes of the
texts, before the vocabulary is fitted.

Texts are in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark. Links are
followed, and files that systems add are skipped; see `engine.files`.

Readable are WikiText and IMDb as their authors ship them (IMDb with its
unlabelled reviews, without its lists of web addresses), folders of users, and
directories of texts that tensorflow-datasets has prepared in array_record,
whose splits are kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import files
from jaxformers.data.engine.source import Keyed, Source
from jaxformers.foundations.errors import UserError

SPLITS = {
  "train": "train",
  "training": "train",
  "valid": "validation",
  "validation": "validation",
  "dev": "validation",
  "test": "test",
}
ENDINGS = (".txt", ".tokens", ".raw", ".md")
PACKED = (*archives.COMPRESSED, ".zip", ".zst")
# Version in the names of prepared data. Raise it when the reading changes.
READING = 2
MAX_BYTES = 1 << 33  # All texts are held in memory, to be sorted.
PIECE = 1 << 20  # Texts of more bytes are cut at the end of a line.


def split_of(name: str) -> str | None:
  """Returns the split that a path names; None if it names no split.

  The innermost folder that names a split counts, or else the file's name.
  """
  *folders, file = name.lower().split("/")
  # Remove numbers and languages from the name: -00001-of-00010, .en, -en.
  stem = re.sub(
    r"([-_.]?\d+(-of-\d+)?|[-_.][a-z]{2})+$", "", file.rpartition(".")[0]
  )
  # Try the last word of the name, then the first, then all words between dots.
  words = re.split(r"[._]", stem)
  words = [words[-1], words[0], *stem.split(".")]
  return next(
    (SPLITS[w] for w in (*folders[::-1], *words) if w in SPLITS), None
  )


def pieces(text: bytes, size: int = PIECE) -> Iterator[bytes]:
  """Cuts a text into parts of about `size` bytes at the ends of lines."""
  start = 0
  # Cut at the first end of a line after `size` bytes, or at the text's end.
  while start < len(text):
    stop = text.find(b"\n", start + size) + 1 or len(text)
    yield text[start:stop]
    start = stop


def read(path: Path) -> dict[str, Iterator[Keyed]]:
  """Reads the texts of every split, sorted by name: `text`, as bytes.

  Prints the number of texts of each split to stderr.

  Raises:
    UserError: for an archive without text files or without training text, or
      with too few texts to hold out a missing split.
  """
  # Name texts of tensorflow-datasets like files in a folder of their split.
  if (path / "dataset_info.json").is_file():
    from jaxformers.data.engine import builder  # Slow to import.

    members: Iterator[tuple[str, bytes]] = (
      (f"{split}/{number:09d}.txt", content)
      for split, texts in builder.open_texts(path).items()
      for number, content in enumerate(texts)
    )
  else:
    members = _decoded(path)
  # Read all texts that are not empty, and divide them into splits.
  by_name = {name: content for name, content in members if content.strip()}
  splits = _splits(path, by_name)
  counts = ", ".join(f"{len(names):,} {s}" for s, names in splits.items())
  print(f"Texts of {path.name}: {counts}.", file=sys.stderr)

  # Cut long texts into examples, which are numbered within a split.
  def rows(names: list[str]) -> Iterator[Keyed]:
    parts = (piece for name in names for piece in pieces(by_name[name]))
    return enumerate({"text": part} for part in parts)

  return {split: rows(names) for split, names in splits.items()}


def _decoded(path: Path) -> Iterator[tuple[str, bytes]]:
  """Yields (name, text in UTF-8) of every text file.

  Raises:
    UserError: for a text in another encoding, or a compressed text.
  """

  def is_wanted(name: str) -> bool:
    stem, ending = os.path.splitext(name.lower())
    if path.is_dir() and ending in PACKED and _is_text(stem):
      raise UserError(
        f"{path / name} is compressed: unpack it, or give the path of the file."
      )
    return _is_text(name)

  texts = archives.members(
    path, max_bytes=MAX_BYTES, wanted=is_wanted, is_users=True
  )
  for name, content in texts:
    place = path if path.is_file() and name == path.name else path / name
    yield name, files.decode_text(content, str(place)).encode()


def _is_text(name: str) -> bool:
  # Skip the lists of web addresses in IMDb's archive.
  addresses = name.rpartition("/")[2].startswith("urls_")
  return name.lower().endswith(ENDINGS) and not addresses


def _splits(path: Path, texts: Mapping[str, bytes]) -> dict[str, list[str]]:
  """Returns the names of the texts of every split, in order."""
  # Group the texts by the splits that their names say.
  splits: dict[str, list[str]] = {}
  skipped: list[str] = []
  for name in sorted(texts):
    split = split_of(name)
    group = skipped if split is None else splits.setdefault(split, [])
    group.append(name)
  # Without any name of a split, all texts are train; otherwise skip the rest.
  if skipped and not splits:
    splits["train"] = skipped
  elif skipped:
    listed = ", ".join(skipped[:5]) + (" ..." if len(skipped) > 5 else "")
    print(
      f"Skipped in {path.name}, because they name no split: {listed}.",
      file=sys.stderr,
    )
  if "train" not in splits:
    content = ", ".join(sorted(splits)) or "no text files at all"
    raise UserError(
      f"{path} holds no training text but {content}: name a file or a folder "
      f"of {'/'.join(ENDINGS)} files train, or name no file after a split."
    )
  # Hold out a tenth for every missing split.
  missing = [name for name in ("validation", "test") if name not in splits]
  count = len(splits["train"]) // 10
  if missing and not count:
    raise UserError(
      f"{path} holds {len(splits['train'])} training texts and no "
      f"{' and no '.join(missing)} split: a tenth of them is less than one. "
      f"Put some text into a file called {missing[0]}.txt."
    )
  # Sort by hashes of the content, so that equal texts are adjacent.
  hashes = {
    name: hashlib.blake2b(texts[name], digest_size=8).digest()
    for name in (splits["train"] if missing else [])
  }
  # Move the first tenth to the first missing split, and the next to the second.
  order = sorted(hashes, key=lambda name: (hashes[name], name))
  for number, split in enumerate(missing):
    held_out = order[number * count : (number + 1) * count]
    splits[split] = sorted(held_out)
    splits["train"] = sorted({*splits["train"]} - {*held_out})
  return splits


def source(path: Path) -> Source:
  """Returns the source of a folder or archive; its checksum is its tag."""
  digest = archives.checksum(path).rpartition("-")[2]
  return Source(
    name="text_files",
    features={"text": bytes},
    read=read,
    tag=f"{digest[:12]}-{READING}",
    archives=(path.name,),
    local_only="is read from a folder or archive of text files",
    shuffled=False,
    is_users=True,
  )
