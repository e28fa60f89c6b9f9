"""Any folder or archive of text files, as the splits of a language model.

What stands in a folder called train, valid, validation, dev or test belongs to
that split, and elsewhere what is called so itself: train.txt, test-00001.txt,
wiki.train.tokens. Without any such name all of it is train; with some, the
others are left out, and named. Where there is no validation or test split, a
tenth of the training texts each is held out, by their hashes, before anything
is fitted to them. So are read WikiText as its authors ship it, IMDb's archive
(its reviews without label, too, if they are there; not its lists of addresses),
a folder of one's own, and a directory in which tensorflow-datasets has prepared
a set of texts in array_record, whose splits it has.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source
from jaxformers.errors import UserError

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
  stem = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", file.rpartition(".")[0])
  words = [*reversed(folders), re.split(r"[._]", stem)[-1]]
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

  How many texts went where is printed to stderr.

  Raises:
    UserError: for an archive without text files, or a directory without text;
      without training text, or of too few texts to hold any out.
  """
  if (path / "dataset_info.json").is_file():
    from jaxformers.data.engine import builder  # Slow to import.

    members: Iterator[tuple[str, bytes]] = (
      (f"{split}/{number:09d}.txt", content)
      for split, found in builder.open_texts(path).items()
      for number, content in enumerate(found)
    )
  else:
    members = archives.members(path, max_bytes=MAX_BYTES, wanted=_is_text)
  texts = {name: content for name, content in members if content.strip()}
  splits = _splits(path, texts)
  counts = ", ".join(f"{len(names):,} {s}" for s, names in splits.items())
  print(f"Texts of {path.name}: {counts}.", file=sys.stderr)

  def rows(names: list[str]) -> Iterator[Keyed]:
    number = 0
    for name in names:
      for piece in pieces(texts[name]):
        yield number, {"text": piece}
        number += 1

  return {split: rows(names) for split, names in splits.items()}


def _is_text(name: str) -> bool:
  # IMDb's archive has lists of the reviews' addresses beside them.
  addresses = name.rpartition("/")[2].startswith("urls_")
  return name.endswith(ENDINGS) and not addresses


def _splits(path: Path, texts: Mapping[str, bytes]) -> dict[str, list[str]]:
  """The names of the texts of every split, in order."""
  chosen = {name: split_of(name) for name in sorted(texts)}
  if not any(chosen.values()):
    chosen = dict.fromkeys(chosen, "train")
  splits: dict[str, list[str]] = {}
  for name, split in chosen.items():
    if split is not None:
      splits.setdefault(split, []).append(name)
  left = [name for name, split in chosen.items() if split is None]
  if left:
    some = ", ".join(left[:5]) + (" ..." if len(left) > 5 else "")
    print(
      f"Left out of {path.name}, for they name no split: {some}.",
      file=sys.stderr,
    )
  if "train" not in splits:
    found = ", ".join(sorted(splits)) or "no text files at all"
    raise UserError(
      f"{path} holds no training text but {found}: name a file or a folder of "
      f"{'/'.join(ENDINGS)} files train, or give them no split's name."
    )
  missing = [name for name in ("validation", "test") if name not in splits]
  count = len(splits["train"]) // 10
  if missing and not count:
    raise UserError(
      f"{path} holds {len(splits['train'])} training texts and no "
      f"{' and no '.join(missing)} split: there is nothing to hold out. Put "
      f"some text into a file called {missing[0]}.txt."
    )
  # By their content: texts that occur twice stand side by side here.
  hashes = {
    name: hashlib.blake2b(texts[name], digest_size=8).digest()
    for name in (splits["train"] if missing else [])
  }
  order = sorted(hashes, key=lambda name: (hashes[name], name))
  for number, split in enumerate(missing):
    held = order[number * count : (number + 1) * count]
    splits[split] = sorted(held)
    splits["train"] = sorted({*splits["train"]} - {*held})
  return splits


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
    is_users=True,
  )
