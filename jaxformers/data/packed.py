"""Sequences of many lengths in one flat array, memory-mapped from disk.

A `Packed` split is a folder with `tokens.npy` (all sequences end to end, one
byte a token where that is enough), `offsets.npy` and `labels.npy`. It is
written beside its place and renamed, so a folder that exists is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packed:
  """A split: sequence i is tokens[offsets[i]:offsets[i + 1]] + shift.

  Attributes:
    tokens: [total], any integer type.
    offsets: int64 [count + 1], rising from 0.
    labels: int32 [count].
    shift: added to every token read: 1 keeps id 0 for padding.
  """

  tokens: np.ndarray
  offsets: np.ndarray
  labels: np.ndarray
  shift: int = 0

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, i: int) -> np.ndarray:
    """The ids of sequence i, int32 [length]."""
    start, stop = self.offsets[i], self.offsets[i + 1]
    return self.tokens[start:stop].astype(np.int32) + self.shift

  def lengths(self) -> np.ndarray:
    """The number of tokens of each sequence, int64 [count]."""
    return np.diff(self.offsets)

  def batch(self, indices: np.ndarray, max_len: int) -> dict[str, np.ndarray]:
    """The sequences of some indices, cut and padded with 0 on the right.

    Args:
      indices: integers [b] within the split.
      max_len: n.

    Returns:
      inputs int32 [b, n] and targets int32 [b].
    """
    inputs = np.zeros((len(indices), max_len), np.int32)
    for row, i in zip(inputs, indices, strict=True):
      start = self.offsets[i]
      stop = min(self.offsets[i + 1], start + max_len)
      row[: stop - start] = self.tokens[start:stop]
      row[: stop - start] += self.shift
    return {"inputs": inputs, "targets": self.labels[indices]}


def pack(sequences: list[np.ndarray], labels: np.ndarray) -> Packed:
  """Packs sequences of one integer type and their labels."""
  offsets = np.zeros(len(sequences) + 1, np.int64)
  np.cumsum([len(s) for s in sequences], out=offsets[1:])
  tokens = np.concatenate(sequences) if sequences else np.zeros(0, np.uint8)
  return Packed(tokens, offsets, np.asarray(labels, np.int32))


def select(packed: Packed, indices: np.ndarray) -> Packed:
  """The split of some indices of another, in their order; tokens are copied."""
  starts, lengths = packed.offsets[indices], packed.lengths()[indices]
  offsets = np.concatenate([[0], np.cumsum(lengths)])
  tokens = np.empty(offsets[-1], packed.tokens.dtype)
  for at, start, length in zip(offsets, starts, lengths, strict=False):
    tokens[at : at + length] = packed.tokens[start : start + length]
  return Packed(tokens, offsets, packed.labels[indices], packed.shift)


def drop(packed: Packed, token: int) -> Packed:
  """The same split without one token, wherever it stands."""
  kept = np.asarray(packed.tokens) != token - packed.shift
  lengths = np.add.reduceat(kept, packed.offsets[:-1], dtype=np.int64)
  lengths[packed.lengths() == 0] = 0  # reduceat sums nothing as one element.
  return dataclasses.replace(
    packed,
    tokens=packed.tokens[kept],
    offsets=np.concatenate([[0], np.cumsum(lengths)]),
  )


def load(folder: Path, shift: int = 0) -> Packed:
  """Opens a split that `build` has written, memory-mapped, read-only."""
  arrays = (
    np.load(folder / f"{name}.npy", mmap_mode="r")
    for name in ("tokens", "offsets", "labels")
  )
  tokens, offsets, labels = arrays
  return Packed(tokens, np.asarray(offsets), np.asarray(labels), shift)


def build(
  folder: Path,
  make: Callable[[], tuple[Mapping[str, Packed], Mapping[str, Any]]],
) -> tuple[dict[str, Packed], dict[str, Any]]:
  """Opens the splits under a folder, making them first where there are none.

  Args:
    folder: where they stand, one folder a split beside `info.json`.
    make: returns the splits and a description (source, checksum, counts) that
      goes to `info.json`; called only if the folder is not there. Whatever it
      raises leaves nothing behind.

  Returns:
    The splits, memory-mapped, and the description.
  """
  if not (folder / "info.json").exists():
    try:
      folder.parent.mkdir(parents=True, exist_ok=True)
      staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=folder.parent))
    except OSError as error:
      raise ValueError(
        f"{folder.parent} cannot be written ({error.strerror}): pass "
        "--config.data_dir=PATH or set JAXFORMERS_DATA_DIR."
      ) from None
    print(f"Preparing {folder.name}, once ...", file=sys.stderr, flush=True)
    try:
      splits, info = make()
      for name, split in splits.items():
        (staged / name).mkdir()
        np.save(staged / name / "tokens.npy", split.tokens)
        np.save(staged / name / "offsets.npy", split.offsets)
        np.save(staged / name / "labels.npy", split.labels)
      info = dict(info, splits={name: len(s) for name, s in splits.items()})
      (staged / "info.json").write_text(json.dumps(info, indent=2))
      try:
        os.rename(staged, folder)
      except OSError:
        # Another process was faster: its splits are the same.
        if not (folder / "info.json").exists():
          raise
    finally:
      shutil.rmtree(staged, ignore_errors=True)
  info = json.loads((folder / "info.json").read_text())
  return {name: load(folder / name) for name in info["splits"]}, info
