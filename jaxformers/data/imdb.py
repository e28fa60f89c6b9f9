"""IMDb reviews as bytes, from a local archive or by tensorflow-datasets."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers.data import packed
from jaxformers.data.packed import Packed

ARCHIVE = "aclImdb_v1.tar.gz"
HOST = ("ai.stanford.edu", 80)
NUM_HELD_OUT = 2_500


def find_archive(archive: str, data_dir: Path) -> Path | None:
  """The local archive: the given one, or where archives are looked for.

  Looks in $JAXFORMERS_DATA_ARCHIVES and `data_dir`/downloads/manual.

  Raises:
    ValueError: if one is given and is not there.
  """
  if archive:
    path = Path(archive).expanduser()
    if not path.is_file():
      raise ValueError(
        f"There is no archive {path}: give the path of {ARCHIVE}, or leave "
        "task.archive empty to download it."
      )
    return path
  folders = [data_dir / "downloads" / "manual"]
  if os.environ.get("JAXFORMERS_DATA_ARCHIVES"):
    folders.insert(0, Path(os.environ["JAXFORMERS_DATA_ARCHIVES"]))
  paths = [folder / ARCHIVE for folder in folders]
  return next((path for path in paths if path.is_file()), None)


def _require_network() -> None:
  """Fails within seconds; the download itself would try for minutes."""
  if any(key.lower().endswith("_proxy") for key in os.environ):
    return  # The download may go where a plain connection cannot.
  outcome: list[OSError | None] = []

  def connect() -> None:
    try:
      socket.create_connection(HOST, timeout=5).close()
      outcome.append(None)
    except OSError as error:
      outcome.append(error)

  # In a thread, for a name server may take longer than any time-out of ours.
  thread = threading.Thread(target=connect, daemon=True)
  thread.start()
  thread.join(8)
  if outcome != [None]:
    reason = outcome[0] if outcome else "no answer in 8 s"
    raise ValueError(
      f"IMDb is neither here nor to be had: {HOST[0]} does not answer "
      f"({reason}). Either run once with a network, or fetch {ARCHIVE} "
      f"elsewhere and pass --config.task.archive=PATH/{ARCHIVE}."
    )


def _sha256(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _prepare(data_dir: Path, local: Path | None) -> tuple[Any, dict[str, Any]]:
  if local is None:
    _require_network()
  import tensorflow_datasets as tfds

  from jaxformers.data import imdb_builder

  sha256 = _sha256(local) if local else imdb_builder.SHA256
  builder = imdb_builder.JaxformersImdb(
    data_dir=data_dir / "tfds" / sha256[:12], file_format="array_record"
  )
  builder.archive = local
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  download = tfds.core.download
  failures = (
    download.download_manager.NonMatchingChecksumError,
    download.util.DownloadError,
    OSError,
  )
  try:
    builder.download_and_prepare(download_config=config)
  except failures as error:
    raise ValueError(
      f"{imdb_builder.URL} could not be had whole ({error}): run again, or "
      f"fetch {ARCHIVE} elsewhere and pass "
      f"--config.task.archive=PATH/{ARCHIVE}."
    ) from error
  splits = {}
  for name in ("train", "test"):
    source = builder.as_data_source(name)
    rows = source.__getitems__(range(len(source)))
    texts = [np.frombuffer(row["text"], np.uint8) for row in rows]
    splits[name] = packed.pack(texts, np.array([row["label"] for row in rows]))
  info = {
    "source": local.name if local else imdb_builder.URL,
    "sha256": sha256,
    "authors_checksum": sha256 == imdb_builder.SHA256,
  }
  return splits, info


def load(
  data_dir: Path, archive: str = ""
) -> tuple[dict[str, Packed], dict[str, Any]]:
  """The splits `train` and `test`, 25,000 reviews each, ids byte + 1.

  Args:
    data_dir: where prepared data stands.
    archive: path of aclImdb_v1.tar.gz; "" for what is prepared already, or an
      archive that is found, or the network.

  Returns:
    The splits, and where they come from.

  Raises:
    ValueError: if there is neither archive nor network, naming both remedies;
      for an archive that is not what it should be; or for another archive than
      the one that the prepared data come from.
  """
  folder = data_dir / "packed" / "imdb-bytes-1"
  local = find_archive(archive, data_dir)
  splits, info = packed.build(folder, lambda: _prepare(data_dir, local))
  if archive and _sha256(local) != info["sha256"]:
    raise ValueError(
      f"{folder} was prepared from another archive ({info['source']}, SHA-256 "
      f"{info['sha256'][:12]}...) than {local}: leave task.archive empty to "
      "use it, or choose another --config.data_dir."
    )
  shifted = {name: packed.load(folder / name, shift=1) for name in splits}
  return shifted, info


def hold_out(train: Packed, count: int = NUM_HELD_OUT) -> tuple[Packed, Packed]:
  """Train without, and with only, the `count` reviews of highest hash.

  The order is that of each text's hash: it depends on nothing else, and a
  review that occurs twice does not stand on both sides.
  """
  digests = [
    hashlib.blake2b(train[i].tobytes(), digest_size=8).digest()
    for i in range(len(train))
  ]
  order = np.argsort(np.array(digests), kind="stable")
  kept, held = np.sort(order[:-count]), np.sort(order[-count:])
  return packed.select(train, kept), packed.select(train, held)
