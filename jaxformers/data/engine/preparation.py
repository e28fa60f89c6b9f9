"""Prepares a `Source` once, and opens its examples and its tokens.

A tensorflow-datasets builder writes array_record files to DATA_DIR/tfds. Their
examples are encoded as memory-mapped tokens in DATA_DIR/packed, which training
reads. `builder` imports tensorflow-datasets, which takes a second: functions
here import `builder` only if they prepare data or read array_record files.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tqdm

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine import digests, packed
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.source import Encoding, Example, Examples, Source
from jaxformers.foundations import paths
from jaxformers.foundations.errors import UserError

RECORD = "source.json"
CHUNK = 1_000  # Number of examples that are read and encoded together.


def data_folder(data_dir: str | Path) -> Path:
  """Returns the folder of prepared data; creates it if it is missing.

  Args:
    data_dir: path of the folder; "" for $JAXFORMERS_DATA_DIR, or else
      ~/.cache/jaxformers.

  Raises:
    UserError: if the folder cannot be created, or if no folder is chosen and
      the home directory is unknown.
  """
  # Resolve the path, which may begin with ~.
  chosen = data_dir or os.environ.get("JAXFORMERS_DATA_DIR")
  try:
    folder = paths.expand(chosen or "~/.cache/jaxformers").absolute()
  except UserError:
    if chosen:
      raise
    raise UserError(
      "The data directory ~/.cache/jaxformers is unknown, because HOME is not "
      "set and this user has no home directory: pass --data_dir (prepare) or "
      "--config.data_dir=PATH, or set JAXFORMERS_DATA_DIR."
    ) from None
  # Create the folder now: a wrong path must fail before data are read.
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(
      f"The data directory {folder} cannot be made ({error.strerror}): pass "
      "--config.data_dir=PATH or set JAXFORMERS_DATA_DIR."
    ) from None
  return folder


def open_splits(
  source: Source, encoding: Encoding, data_dir: str | Path, archive: str = ""
) -> tuple[dict[str, Packed], dict[str, Any]]:
  """Opens the splits of a source as tokens; prepares and packs them if needed.

  Args:
    source: the data set.
    encoding: encoding that turns the examples into tokens.
    data_dir: folder of prepared data; see `data_folder`.
    archive: path of the archive, an unpacked folder, or a directory that a
      stock tensorflow-datasets builder has prepared in array_record; "" uses
      prepared data, or else searches for the archive, or else downloads it.

  Returns:
    The splits, and a description of their origin: `source`, `sha256` and
    `authors_checksum`, which is False for an archive that differs from the
    authors', and None if the authors have published no checksum.

  Raises:
    UserError: if there is neither an archive nor a network; for an archive with
      unexpected content; or if the data were prepared from another archive than
      `archive`.
  """

  root = data_folder(data_dir)

  def make(staged: Path) -> Mapping[str, Any]:
    examples, info = open_examples(source, root, archive)
    # Fit the vocabulary, if any, to the training split only.
    train = examples["train" if "train" in examples else next(iter(examples))]
    encode, extra = encoding.fit(
      example for chunk in _chunks(train, "reading") for example in chunk
    )

    def to_number(label: Any) -> int:
      # Labels that are names become their places among the classes.
      if not isinstance(label, bytes):
        return int(label)
      return extra["classes"].index(label.decode())

    def rows(split: str) -> Iterator[packed.Row]:
      # Yield (sequences, label, key) of every example.
      for chunk in _chunks(examples[split], f"packing {source.name}/{split}"):
        for example, row in zip(chunk, encode(chunk), strict=True):
          yield row, to_number(example.get("label", 0)), encoding.key(example)

    # Write every split while it is encoded, without holding it in memory.
    for split in examples:
      packed.write(staged / split, rows(split), encoding.dtype)
    return info | extra

  # Open the packed splits; `build_packed` calls `make` if they are missing.
  folder = root / "packed" / f"{source.key}-{encoding.name}"
  splits, info = packed.build_packed(folder, make)
  _require_same_archive(source, folder, info, archive)
  return splits, info


def open_examples(
  source: Source, data_dir: Path, archive: str = ""
) -> tuple[dict[str, Examples], dict[str, Any]]:
  """Opens the splits of a source with random access; prepares them if needed.

  Verifies the digests of files that this package has prepared; files of a
  stock builder have no digests.

  Arguments, the returned description and errors are as in `open_splits`.
  """
  # Read a directory of a stock builder in place.
  local = archives.find(source.archives, archive, data_dir)
  may_be_stock = not source.is_users
  if local and may_be_stock and (local / "dataset_info.json").is_file():
    from jaxformers.data.engine import builder

    info = _describe(source, local)
    return builder.open_stock(source, local), info
  # Prepare array_record files once, and verify them at every start.
  folder = data_dir / "tfds" / source.key
  packed.stage(folder, lambda staged: _prepare(source, local, data_dir, staged))
  source.finish()
  info, _ = digests.verify(folder, RECORD)
  _require_same_archive(source, folder, info, archive)
  from jaxformers.data.engine import builder

  return builder.open_prepared(source, folder), info


def _prepare(
  source: Source, local: Path | None, data_dir: Path, staged: Path
) -> None:
  """Writes the array_record files of a source into an empty folder."""
  # Check the free space of the disk.
  free = shutil.disk_usage(staged).free
  if source.least_bytes > free:
    raise UserError(
      f"{source.key} needs at least {source.least_bytes / 2**20:,.0f} MiB, but "
      f"only {free / 2**20:,.0f} MiB are free in {data_dir}: choose fewer "
      "examples, or another --config.data_dir."
    )
  # Without an archive, fail early if it cannot be downloaded.
  if local is None and source.archives:
    if not source.url:
      raise UserError(
        f"{source.name} is not here and {source.local_only}. Pass the path of "
        f"{' or '.join(source.archives)} with --archive (prepare) or "
        "--config.task.archive."
      )
    _require_network(source)
  from jaxformers.data.engine import builder

  # Print a message that preparation begins, and warn of another checksum.
  print(f"Preparing {source.key}, once ...", file=sys.stderr, flush=True)
  info = _describe(source, local)
  if info.get("authors_checksum", True) is False:
    print(
      f"{info['source']} has another checksum than the authors' archive: it "
      "is read only if it has the number of examples that the task expects.",
      file=sys.stderr,
    )
  # Write the examples, and seal the folder with their digests.
  builder.prepare(source, local, staged, data_dir / "downloads")
  digests.seal(staged, RECORD, info)


def _describe(source: Source, local: Path | None) -> dict[str, Any]:
  """Returns the description of the origin of the examples for `source.json`."""
  if not source.archives:
    return {"source": "generated", "settings": dict(source.settings)}
  sha256 = archives.checksum(local) if local else source.sha256
  # None: no checksum is published, so the archive may still be the authors'.
  published = {source.sha256, *source.also} - {""}
  is_authors = sha256 in published if published else None
  return {
    "source": local.name if local else source.url,
    "sha256": sha256,
    "authors_checksum": source.is_users or is_authors,
  }


def _require_same_archive(
  source: Source, folder: Path, info: Mapping[str, Any], archive: str
) -> None:
  """Raises UserError if data were prepared from another archive than chosen."""
  if not archive or not source.archives:
    return
  path = archives.find(source.archives, archive, folder)
  assert path is not None  # `find` raises an error for a missing archive.
  if archives.checksum(path) != info["sha256"]:
    raise UserError(
      f"{folder} was prepared from another archive ({info['source']}, SHA-256 "
      f"{info['sha256'][:12]}...) than {path}: remove the archive option to "
      f"use the folder, delete the folder, or choose another data directory."
    )


def _chunks(examples: Examples, title: str) -> Iterator[Sequence[Example]]:
  """Yields all examples in order, in lists of `CHUNK`; shows a progress bar."""
  with tqdm.tqdm(
    total=len(examples), desc=title, file=sys.stderr, disable=None
  ) as bar:
    for start in range(0, len(examples), CHUNK):
      chunk = range(len(examples))[start : start + CHUNK]
      yield examples.__getitems__(chunk)
      bar.update(len(chunk))


def _require_network(source: Source) -> None:
  """Raises UserError if the host of the archive does not answer.

  This check takes at most 8 seconds; the download would retry for minutes.
  """
  if any(key.lower().endswith("_proxy") for key in os.environ):
    return  # With a proxy, a direct connection may fail where downloads work.
  # Connect to the host and port of the archive, and disconnect.
  url = urllib.parse.urlsplit(source.url)
  port = url.port or {"http": 80, "https": 443}[url.scheme]
  reason: Any = "no answer in 8 s"

  def connect() -> None:
    nonlocal reason
    try:
      socket.create_connection((url.hostname, port), timeout=5).close()
      reason = None
    except OSError as error:
      reason = error

  # Use a thread: a DNS look-up may take longer than the time-out above.
  thread = threading.Thread(target=connect, daemon=True)
  thread.start()
  thread.join(8)
  if reason is not None:
    raise UserError(
      f"{source.name} is not here, and {url.hostname} does not answer "
      f"({reason}): run once with a network, or fetch {source.archives[0]} "
      f"elsewhere and pass {source.archive_options}."
    )
