"""Parts of a large split on disk, which tensorflow-datasets sorts one by one.

Its own class of them needs TensorFlow. A split of more than 1 GB is written to
a thousand of them, by the keys of its examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

KEY_BYTES, SIZE_BYTES = 16, 8


class Bucket:
  """A file of examples with their keys, with tensorflow-datasets' methods.

  Attributes:
    size: bytes of all examples.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self._path = Path(path)
    self._count = 0
    self.size = 0

  def __len__(self) -> int:
    return self._count

  def add(self, key: int, data: bytes) -> None:
    """Appends an example.

    Args:
      key: number in [0, 2^128).
      data: the serialised example.
    """
    self._path.parent.mkdir(parents=True, exist_ok=True)
    # Files stay closed between examples: a process may not open a thousand.
    with self._path.open("ab") as file:
      file.write(key.to_bytes(KEY_BYTES, "big"))
      file.write(len(data).to_bytes(SIZE_BYTES, "big"))
      file.write(data)
    self._count += 1
    self.size += len(data)

  def read_values(self) -> Iterator[tuple[int, bytes]]:
    """Yields the keys and examples in the order in which they were added."""
    if not self._count:
      return
    with self._path.open("rb") as file:
      for _ in range(self._count):
        key = int.from_bytes(file.read(KEY_BYTES), "big")
        size = int.from_bytes(file.read(SIZE_BYTES), "big")
        yield key, file.read(size)

  def del_file(self) -> None:
    """Removes the file, if there is one."""
    self._path.unlink(missing_ok=True)
