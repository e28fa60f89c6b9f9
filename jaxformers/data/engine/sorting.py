"""Sorts the examples of a split by key, on disk if they exceed the memory."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

KeyedBytes = tuple[int, bytes]  # A key in [0, 2^128), a serialised example.

MAX_MEMORY = 1_000 << 20  # Bytes of examples that are held in memory.
PART_BITS = 10  # All keys in a file on disk have the same first bits.
PART_SHIFT = 128 - PART_BITS
HEAD = struct.Struct(">16sQ")  # Key and number of bytes of an example.


class ExampleSorter:
  """Collects examples, and yields them once in the order of their keys.

  If the examples exceed `MAX_MEMORY` bytes, they are divided into up to 1,024
  files by the first bits of the keys. Each file is sorted separately and
  deleted once it is read, so the disk never holds the split twice.

  Attributes:
    num_examples: number of examples.
    num_bytes: bytes of all examples.
  """

  def __init__(self, folder: Path) -> None:
    self._folder = folder
    self._held: list[KeyedBytes] = []
    self._num_held_bytes = 0
    self._is_on_disk = False
    self.num_examples = 0
    self.num_bytes = 0

  def add(self, key: int, data: bytes) -> None:
    """Adds an example.

    Args:
      key: number in [0, 2^128), different for every example.
      data: the serialised example.
    """
    self._held.append((key, data))
    self._num_held_bytes += len(data)
    self.num_examples += 1
    self.num_bytes += len(data)
    # Move the examples to disk if they exceed the memory.
    if self._num_held_bytes > MAX_MEMORY:
      self._write_held()

  def __iter__(self) -> Iterator[KeyedBytes]:
    # Sort in memory if nothing is on disk.
    if not self._is_on_disk:
      self._held.sort()
      yield from self._held
      return
    # Sort the files one by one, in the order of the first bits of their keys.
    self._write_held()
    for part in range(1 << PART_BITS):
      path = self._path(part)
      if path.exists():
        examples = sorted(_read(path))
        path.unlink()
        yield from examples

  def _path(self, part: int) -> Path:
    return self._folder / f"part-{part:04d}.tmp"

  def _write_held(self) -> None:
    """Appends the examples in memory to the files."""
    self._is_on_disk = True
    # Sort the examples, so that each file is opened once, one at a time: a
    # process may not open a thousand files.
    self._held.sort()
    parts = itertools.groupby(self._held, lambda item: item[0] >> PART_SHIFT)
    for part, examples in parts:
      with self._path(part).open("ab") as file:
        for key, data in examples:
          file.write(HEAD.pack(key.to_bytes(16, "big"), len(data)))
          file.write(data)
    self._held.clear()
    self._num_held_bytes = 0


def _read(path: Path) -> Iterator[KeyedBytes]:
  """Yields the keys and examples of a file."""
  with path.open("rb") as file:
    while head := file.read(HEAD.size):
      key, size = HEAD.unpack(head)
      yield int.from_bytes(key, "big"), file.read(size)
