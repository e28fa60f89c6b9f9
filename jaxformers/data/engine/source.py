"""Where a data set comes from, and its examples once they are prepared.

A `Source` is prepared once, by a tensorflow-datasets builder, to array_record
files under DATA_DIR/tfds; from them tasks pack what they read while training.
This file does without tensorflow-datasets, which is slow to import, until
something has to be prepared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import digests, packed
from jaxformers.data.engine.packed import Packed
from jaxformers.errors import UserError

RECORD = "source.json"

Example = Mapping[str, Any]
Keyed = tuple[str | int, Example]
Encode = Callable[[Sequence[Example]], Iterable[Sequence[np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Source:
  """A data set: what an example holds, and how its archive is read.

  Attributes:
    name: of the tensorflow-datasets builder.
    features: `bytes` for text, a tuple of class names for a label, (height,
      width, channels) for an image, `np.uint8` for ids.
    read: from the archive (None where there is none) to the examples of every
      split, each with its key.
    settings: of what is generated; they tell one version from another.
    tag: what stands for the settings in the folder's name, "" for their values.
    archives: names of files and folders that are looked for.
    url, sha256, size: of the archive as its authors ship it; "" where it
      cannot be downloaded.
    also: SHA-256 of other archives that the authors ship.
    homepage: of the authors.
    counts: examples of each split, where a stock builder has the same.
    finish: called when all of it is prepared, and nothing can be lost any more.
    shuffled: whether examples are put into the order of their keys' hashes, as
      the stock builders do, or keep theirs.
    own: whether it is the user's, so that there is no archive of authors.
    local_only: why there is no download, and where the archive is to be had.
  """

  name: str
  features: Mapping[str, Any]
  read: Callable[[Path | None], Mapping[str, Iterable[Keyed]]]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tag: str = ""
  archives: tuple[str, ...] = ()
  url: str = ""
  sha256: str = ""
  size: int = 0
  also: tuple[str, ...] = ()
  homepage: str = ""
  counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  finish: Callable[[], None] = lambda: None
  shuffled: bool = True
  own: bool = False
  local_only: str = ""

  @property
  def key(self) -> str:
    """The name of its folder, which tells its settings."""
    values = [self.tag] if self.tag else map(str, self.settings.values())
    return "-".join([self.name, *values])


def collect(
  stream: Iterable[tuple[str, str | int, Example]],
  path: Path,
  expected: Mapping[str, Mapping[Any, int]],
) -> dict[str, list[Keyed]]:
  """Gathers (split, key, example) by split, and checks counts and labels.

  Args:
    stream: of one archive.
    path: of the archive, for the message.
    expected: split -> label -> how many; the label None stands for all of the
      split, whatever their labels.

  Raises:
    UserError: if there is another number of any.
  """
  splits: dict[str, list[Keyed]] = {name: [] for name in expected}
  counts: Counter[tuple[str, Any]] = Counter()
  for split, key, example in stream:
    splits[split].append((key, example))
    counts[split, example["label"]] += 1
    counts[split, None] += 1
  for split, labels in expected.items():
    for label, count in labels.items():
      if counts[split, label] != count:
        what = "examples" if label is None else f"examples of {label!r}"
        raise UserError(
          f"{path} holds {counts[split, label]:,} {what} under {split!r} "
          f"instead of {count:,}: it is not what it should be, or was cut "
          "short. Fetch it again; nothing was kept of it."
        )
  return splits


@dataclasses.dataclass(frozen=True)
class Encoding:
  """How examples become tokens.

  Attributes:
    name: of the folder; another encoding needs another.
    fit: from the training split, all of it by an iterator, to a function from
      a list of examples to their rows of sequences, and what to remember of it
      in `info.json`.
    key: from an example to the number that it is known by, under 2^64.
    dtype: of the tokens.
  """

  name: str
  fit: Callable[[Iterator[Example]], tuple[Encode, dict[str, Any]]]
  key: Callable[[Example], int]
  dtype: Any = np.uint8


def pack(
  source: Source, encoding: Encoding, *, data_dir: Path, archive: str = ""
) -> tuple[dict[str, Packed], dict[str, Any]]:
  """The splits of a source as tokens; prepared and packed if they are not.

  Args:
    source: the data set.
    encoding: how its examples become tokens.
    data_dir: where prepared data stands.
    archive: path of the archive, an unpacked folder, or a directory that a
      stock tensorflow-datasets builder has prepared in array_record; "" for
      what is prepared already, or found, or downloaded.

  Returns:
    The splits, and where they come from: `source`, `sha256` and
    `authors_checksum`, false for an archive that is not the authors' own.

  Raises:
    UserError: if it can be had neither here nor by network, naming what would
      do; for an archive that is not what it should be; for another archive than
      the one that the prepared data come from.
  """

  def make(staged: Path) -> Mapping[str, Any]:
    examples, info = open_examples(source, data_dir, archive)
    first = examples["train" if "train" in examples else next(iter(examples))]
    encode, extra = encoding.fit(
      example for chunk in _read(first, "reading") for example in chunk
    )

    def rows(split: str) -> Iterator[packed.Row]:
      for chunk in _read(examples[split], f"packing {source.name}/{split}"):
        for example, row in zip(chunk, encode(chunk), strict=True):
          yield row, example.get("label", 0), encoding.key(example)

    for split in examples:
      packed.write(staged / split, rows(split), encoding.dtype)
    return info | extra

  folder = data_dir / "packed" / f"{source.key}-{encoding.name}"
  splits, info = packed.build(folder, make)
  _same_archive(source, folder, info, archive)
  return splits, info


def open_examples(
  source: Source, data_dir: Path, archive: str = ""
) -> tuple[dict[str, Sequence[Example]], dict[str, Any]]:
  """The splits of a source by random access; prepared first if they are not.

  What was prepared here is read and compared with its digests; what a stock
  builder has prepared has none, nor has a folder of an older version.

  Arguments, description and errors are those of `pack`.
  """
  given = archives.find(source.archives, archive, data_dir)
  ours = given is None or source.own
  if not ours and (given / "dataset_info.json").is_file():
    from jaxformers.data.engine import builder

    info = _describe(source, given)
    return builder.open_stock(source, given), info
  folder = data_dir / "tfds" / source.key
  packed.stage(folder, lambda staged: _prepare(source, given, data_dir, staged))
  source.finish()
  info = _verified(folder)
  _same_archive(source, folder, info, archive)
  from jaxformers.data.engine import builder

  return builder.open_prepared(source, folder), info


def _verified(folder: Path) -> dict[str, Any]:
  """Returns where prepared examples come from, after verifying all files."""
  if not digests.is_older(folder, RECORD, "source"):
    return digests.verify(folder, RECORD)[0]
  print(
    f"{folder} is of an older version, which wrote no digests: only its "
    "records are verified, by their own checksums. Remove it to prepare it "
    "again.",
    file=sys.stderr,
  )
  return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def _prepare(
  source: Source, given: Path | None, data_dir: Path, staged: Path
) -> None:
  if given is None and source.archives:
    if not source.url:
      raise UserError(
        f"{source.name} is not here and {source.local_only}. Pass the path of "
        f"{' or '.join(source.archives)} with --archive (prepare) or "
        "--config.task.archive."
      )
    _require_network(source)
  from jaxformers.data.engine import builder

  print(f"Preparing {source.key}, once ...", file=sys.stderr, flush=True)
  info = _describe(source, given)
  if not info.get("authors_checksum", True):
    print(
      f"{info['source']} has another checksum than the authors' archive; it "
      "is taken only with the number of examples that the task expects.",
      file=sys.stderr,
    )
  builder.prepare(source, given, staged, data_dir / "downloads")
  digests.seal(staged, RECORD, info)


def _describe(source: Source, given: Path | None) -> dict[str, Any]:
  if not source.archives:
    return {"source": "generated", "settings": dict(source.settings)}
  sha256 = archives.checksum(given) if given else source.sha256
  return {
    "source": given.name if given else source.url,
    "sha256": sha256,
    "authors_checksum": source.own or sha256 in (source.sha256, *source.also),
  }


def _same_archive(
  source: Source, folder: Path, info: Mapping[str, Any], archive: str
) -> None:
  if not archive or not source.archives:
    return
  path = archives.find(source.archives, archive, folder)
  if archives.checksum(path) != info["sha256"]:
    raise UserError(
      f"{folder} was prepared from another archive ({info['source']}, SHA-256 "
      f"{info['sha256'][:12]}...) than {path}: leave the archive out to use "
      f"it, delete it, or choose another data directory."
    )


def _read(
  examples: Sequence[Example], title: str
) -> Iterator[Sequence[Example]]:
  """All examples in order, in lists of a thousand, with a bar."""
  with tqdm.tqdm(
    total=len(examples), desc=title, file=sys.stderr, disable=None
  ) as bar:
    for start in range(0, len(examples), 1_000):
      indices = range(start, min(start + 1_000, len(examples)))
      yield examples.__getitems__(indices)
      bar.update(len(indices))


def _require_network(source: Source) -> None:
  """Fails within seconds; the download itself would try for minutes."""
  if any(key.lower().endswith("_proxy") for key in os.environ):
    return  # The download may go where a plain connection cannot.
  url = urllib.parse.urlsplit(source.url)
  port = url.port or {"http": 80, "https": 443}[url.scheme]
  outcome: list[OSError | None] = []

  def connect() -> None:
    try:
      socket.create_connection((url.hostname, port), timeout=5).close()
      outcome.append(None)
    except OSError as error:
      outcome.append(error)

  # In a thread, for a name server may take longer than any time-out of ours.
  thread = threading.Thread(target=connect, daemon=True)
  thread.start()
  thread.join(8)
  if outcome != [None]:
    reason = outcome[0] if outcome else "no answer in 8 s"
    name = source.archives[0]
    raise UserError(
      f"{source.name} is neither here nor to be had: {url.hostname} does not "
      f"answer ({reason}). Either run once with a network, or fetch {name} "
      f"elsewhere and pass --archive PATH/{name} (prepare) or "
      f"--config.task.archive=PATH/{name}."
    )
