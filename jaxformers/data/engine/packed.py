"""Sequences of different lengths in one flat array, memory-mapped from disk.

A `Packed` split is a folder with `tokens.npy` (all sequences end to end, in a
type that holds all ids or numbers), `offsets.npy`, `labels.npy` and `keys.npy`.
A folder is written under a temporary name and then renamed, so a folder that
exists is complete. `info.json` keeps the digests of all files, which are
compared whenever the folder is opened.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import filelock
import numpy as np

from jaxformers.data.engine import digests
from jaxformers.data.engine.split import Key, Split
from jaxformers.foundations import durable
from jaxformers.foundations.errors import UserError

RECORD = "info.json"


@dataclasses.dataclass(frozen=True)
class Packed(Split):
  """A split of packed sequences, with the settings that turn them into inputs.

  Sequence k is tokens[starts[k]:stops[k]] + shift. Example i has the num_inputs
  sequences num_inputs * i, num_inputs * i + 1, ...

  Attributes:
    tokens: tokens of all sequences, any integer type [total].
    starts, stops: bounds of every sequence, int64 [num_inputs * count].
    labels: class of every example, int32 [count].
    keys: identifiers of the examples, uint64 [count]: a number, or a hash of
      the text. Keys do not depend on the encoding.
    shift: number added to every stored token; 1 keeps id 0 for padding.
    num_inputs: number of sequences of an example; 2 for pairs.
    start: id that opens every sequence; 0 for none.
    end: id that closes every sequence, including sequences that are cut; 0 for
      none.
    scale: (mean, deviation) that normalise tokens to float32 numbers; None for
      ids.
    content: digest of all tokens; "" to compute it when `digest` is called.
      Code that replaces `tokens` must replace `content` too.
  """

  tokens: np.ndarray
  starts: np.ndarray
  stops: np.ndarray
  labels: np.ndarray
  keys: np.ndarray
  shift: int = 0
  num_inputs: int = 1
  start: int = 0
  end: int = 0
  scale: tuple[float, float] | None = None
  content: str = ""

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, k: int) -> np.ndarray:
    """Returns the ids of sequence k without start and end, int32 [length]."""
    tokens = self.tokens[self.starts[k] : self.stops[k]]
    return tokens.astype(np.int32) + self.shift

  def lengths(self) -> np.ndarray:
    """Returns the length of each example's longest sequence, int64 [count]."""
    # Count the start and end ids too.
    lengths = self.sizes.reshape(-1, self.num_inputs)
    return lengths.max(1, initial=0) + bool(self.start) + bool(self.end)

  @property
  def sizes(self) -> np.ndarray:
    """Number of stored tokens of every sequence, int64 [num_inputs * count]."""
    return self.stops - self.starts

  def raw(self, k: int) -> np.ndarray:
    """Returns the stored tokens of sequence k, without `shift`."""
    return self.tokens[self.starts[k] : self.stops[k]].view(np.ndarray)

  def digest(self) -> str:
    """Returns the digest of all tokens, sequences, labels and keys."""
    content = self.content or digests.of_array(self.tokens)
    arrays = (self.starts, self.stops, self.labels, self.keys)
    return digests.of_parts(content, str(self.num_inputs), *arrays)

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn tokens into inputs, as plain JSON."""
    scale = self.scale and list(self.scale)
    start = {"start_id": self.start} if self.start else {}
    return {"first_id": self.shift, **start, "end_id": self.end, "scale": scale}

  def select(self, indices: Any) -> Self:
    """Returns the split of the examples at `indices`; does not copy tokens.

    Args:
      indices: integers [k], or a slice.
    """
    if isinstance(indices, slice):
      indices = np.arange(len(self))[indices]
    # Select the bounds of the sequences, and the labels and keys.
    rows = _rows(self, indices)
    starts, stops = self.starts[rows], self.stops[rows]
    labels, keys = self.labels[indices], self.keys[indices]
    return dataclasses.replace(
      self, starts=starts, stops=stops, labels=labels, keys=keys
    )

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples, cut and padded with 0 on the right.

    Args:
      indices: numbers of the examples in the split, integers [b].
      max_len: n, the number of tokens of every row of the batch.
      key: ignored, because sequences are not augmented.

    Returns:
      inputs [b, n], or [b, num_inputs, n] if num_inputs > 1; int32, or float32
      with a `scale`. targets int32 [b].
    """
    del key
    rows = _rows(self, indices)
    inputs: np.ndarray = np.zeros((len(rows), max_len), np.int32)
    # Cut the sequences, and leave room for the start and end ids.
    starts = self.starts[rows]
    first = int(bool(self.start))
    room = max_len - first - bool(self.end)
    stops = np.minimum(self.stops[rows], starts + room)
    # Copy row by row from a plain view: slicing a memmap is slow.
    tokens = self.tokens.view(np.ndarray)
    bounds = zip(starts.tolist(), stops.tolist(), strict=True)
    for row, (start, stop) in zip(inputs, bounds, strict=True):
      last = first + stop - start
      stored, out = tokens[start:stop], row[first:last]
      np.add(stored, self.shift, out=out, dtype=np.int32)
      if self.start:
        row[0] = self.start
      if self.end:
        row[last] = self.end
    # Normalise to (x - mean) / deviation.
    if self.scale is not None:
      mean, deviation = self.scale
      inputs = ((inputs - mean) / deviation).astype(np.float32)
    # Group the sequences of an example: [b, num_inputs, n].
    if self.num_inputs > 1:
      inputs = inputs.reshape(-1, self.num_inputs, max_len)
    return {"inputs": inputs, "targets": self.labels[indices]}


def _rows(packed: Packed, indices: np.ndarray) -> np.ndarray:
  """Returns the numbers of the sequences of the examples at `indices`."""
  k = packed.num_inputs
  return (np.asarray(indices)[:, None] * k + np.arange(k)).ravel()


def pack(
  sequences: Sequence[np.ndarray], labels: np.ndarray, **fields: Any
) -> Packed:
  """Packs sequences of one integer type and their labels in memory.

  Args:
    sequences: integer arrays [length].
    labels: integers [count].
    **fields: other fields of `Packed`.
  """
  offsets = np.zeros(len(sequences) + 1, np.int64)
  np.cumsum([len(s) for s in sequences], out=offsets[1:])
  tokens = np.concatenate(sequences) if sequences else np.zeros(0, np.uint8)
  labels = np.asarray(labels, np.int32)
  keys = np.arange(len(labels), dtype=np.uint64)
  return Packed(tokens, offsets[:-1], offsets[1:], labels, keys, **fields)


def drop(packed: Packed, token: int) -> Packed:
  """Returns a split from which every occurrence of a token is removed."""
  is_kept = np.asarray(packed.tokens) != token - packed.shift
  tokens = packed.tokens[is_kept]
  # The number of kept tokens before a place is the place's new number.
  before = np.concatenate([[0], np.cumsum(is_kept)])
  starts, stops = before[packed.starts], before[packed.stops]
  return dataclasses.replace(
    packed, tokens=tokens, starts=starts, stops=stops, content=""
  )


Row = tuple[Sequence[np.ndarray], int, int]


def write(folder: Path, rows: Iterable[Row], dtype: Any = np.uint8) -> None:
  """Writes a split row by row; never holds all tokens in memory.

  Args:
    folder: folder to create.
    rows: (sequences, label, key) of every example.
    dtype: type of the tokens.
  """
  folder.mkdir()
  lengths, labels, keys = [0], [], []
  with (folder / "tokens.npy").open("wb") as file:
    # Write a preliminary header: the number of tokens is not known yet.
    _header(file, 0, dtype)
    for sequences, label, key in rows:
      for sequence in sequences:
        file.write(np.ascontiguousarray(sequence, dtype).tobytes())
        lengths.append(len(sequence))
      labels.append(label)
      keys.append(key)
    # Overwrite the header with the number of tokens.
    file.seek(0)
    _header(file, sum(lengths), dtype)
  # Write the small arrays.
  save(folder / "offsets.npy", np.cumsum(lengths, dtype=np.int64))
  save(folder / "labels.npy", np.array(labels, np.int32))
  save(folder / "keys.npy", np.array(keys, np.uint64))


def save(path: Path, array: np.ndarray) -> None:
  """Writes a flat array like `np.save`, but with errors that give a reason."""
  with path.open("wb") as file:
    _header(file, len(array), array.dtype)
    file.write(array.tobytes())


def _header(file: Any, total: int, dtype: Any) -> None:
  # NumPy pads the header, so a larger `total` does not change its size.
  description = np.lib.format.dtype_to_descr(np.dtype(dtype))
  np.lib.format.write_array_header_1_0(
    file, {"descr": description, "fortran_order": False, "shape": (total,)}
  )


def open_split(folder: Path, content: str = "") -> Packed:
  """Opens a split that `write` has written, memory-mapped and read-only.

  Args:
    folder: folder of the split; its files are not verified.
    content: digest of the tokens; see `Packed`.
  """
  # Map the tokens, and read the small arrays, which every batch needs.
  tokens = np.load(folder / "tokens.npy", mmap_mode="r")
  offsets, labels, keys = (
    np.load(folder / f"{name}.npy") for name in ("offsets", "labels", "keys")
  )
  num_inputs = (len(offsets) - 1) // max(len(labels), 1) or 1
  return Packed(
    tokens,
    offsets[:-1],
    offsets[1:],
    labels,
    keys,
    num_inputs=num_inputs,
    content=content,
  )


def stage(folder: Path, make: Callable[[Path], None]) -> None:
  """Creates a folder atomically and only once, under a lock.

  Other processes that need the folder wait for the process that creates it. The
  next call removes the remains of a killed process. All content is on the disk
  before the folder gets its final name.

  Args:
    folder: folder to create; nothing happens if it exists.
    make: function that fills an empty folder, its argument.

  Raises:
    UserError: if the parent of the folder cannot be written, or the disk is
      full.
  """
  # Refuse a dangling link: later steps would fail with obscure errors.
  if folder.is_symlink() and not folder.exists():
    raise UserError(
      f"{folder} is a link to {folder.readlink()}, which does not exist: "
      "remove the link and run again, or correct it."
    )
  if folder.exists():
    return
  # Wait for other processes that create the same folder.
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = _acquire(folder)
  except OSError as error:
    raise UserError(
      f"{folder.parent} cannot be written ({error.strerror}): {_OTHER_FOLDER}"
    ) from None
  with lock:
    # Look again: another process may have created the folder meanwhile.
    if folder.exists():
      return
    # Fill a temporary folder, then rename it.
    staged = folder.parent / f".staged-{folder.name}"
    shutil.rmtree(staged, ignore_errors=True)
    try:
      staged.mkdir()
      make(staged)
      durable.rename(staged, folder)
    except BaseException as error:
      # Free the space first, then report how much is free.
      shutil.rmtree(staged, ignore_errors=True)
      reason = durable.full_disk_reason(error)
      if reason is None:
        raise
      free = shutil.disk_usage(folder.parent).free / 1e6
      raise UserError(
        f"{folder} cannot be written: {reason} ({free:,.1f} MB are free now "
        "that the incomplete folder is removed). Make room and run again, or "
        f"choose another place: {_OTHER_FOLDER}"
      ) from None


_OTHER_FOLDER = (
  "pass --data_dir, --config.data_dir=PATH, or set JAXFORMERS_DATA_DIR."
)


def _acquire(folder: Path) -> filelock.AcquireReturnProxy:
  """Waits for the lock of a folder; returns its context manager."""
  lock = filelock.FileLock(folder.parent / f".{folder.name}.lock")
  try:
    return lock.acquire(timeout=0)
  except filelock.Timeout:
    print(f"Another process prepares {folder.name}: waiting.", file=sys.stderr)
    return lock.acquire()


def build_packed(
  folder: Path, make: Callable[[Path], Mapping[str, Any]]
) -> tuple[dict[str, Packed], dict[str, Any]]:
  """Opens the splits in a folder; creates the folder first if it is missing.

  Compares all files with their digests.

  Args:
    folder: folder of `info.json`, and of a folder for each split.
    make: function that writes the splits with `write` into a folder, its
      argument, and returns a description (source, checksum) for `info.json`.
      It is called only if `folder` is missing. If it raises an exception, the
      incomplete folder is removed.

  Returns:
    The splits, memory-mapped, and the description.

  Raises:
    UserError: for damaged files, or a folder that cannot be written.
  """

  def fill(staged: Path) -> None:
    print(f"Packing {folder.name}, once ...", file=sys.stderr, flush=True)
    info = dict(make(staged))
    names = sorted(path.name for path in staged.iterdir() if path.is_dir())
    info["splits"] = {name: len(open_split(staged / name)) for name in names}
    digests.seal(staged, RECORD, info)

  # Create the folder, verify it, and map its splits.
  stage(folder, fill)
  info, files = digests.verify(folder, RECORD)
  splits = {
    name: open_split(folder / name, files[f"{name}/tokens.npy"])
    for name in info["splits"]
  }
  return splits, info
