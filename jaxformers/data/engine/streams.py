"""Content of a file, plain or compressed, read to its end and within a limit.

Python's gzip, bz2 and lzma files do not suffice: they ignore data behind the
compressed stream of a bz2 or xz, and an xz may make them ask for any memory.

Source: RFC 1952 for what may follow a gzip.
"""

from __future__ import annotations

import bz2
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

CHUNK = 1 << 18  # Bytes of a compressed file that are read at a time.
BUFFER = 1 << 20  # Bytes that are decompressed at a time.
MAX_DICTIONARY = 1 << 30  # Bytes of memory that an xz may ask for.

# Errors of a damaged file.
DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


class TooLargeError(Exception):
  """A file that unpacks to more bytes than are allowed."""


# Decompressors by the first bytes of a file.
DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
  b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),  # Verifies the trailer.
  b"BZh": bz2.BZ2Decompressor,
  b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(
    lzma.FORMAT_XZ, memlimit=MAX_DICTIONARY
  ),
}


def is_compressed(start: bytes) -> bool:
  """Returns True for the first bytes of a compressed file."""
  return start.startswith(tuple(DECOMPRESSORS))


def _decompress(raw: Any, start: bytes, magic: bytes) -> Iterator[bytes]:
  """Yields the content of a file in parts of at most `BUFFER` bytes.

  The checksum of every compressed stream is verified at its end. Zeros may
  follow it, as on tapes, or another stream, as parallel compressors write.

  Args:
    raw: the file, opened in binary mode and read up to `start`.
    start: its first bytes.
    magic: key of `DECOMPRESSORS`, with which they begin; b"" for no
      compression.

  Raises:
    EOFError: if a compressed stream has no end.
    OSError, tarfile.ReadError, zlib.error, lzma.LZMAError: for damaged content.
  """
  pending = start
  while pending and not magic:
    yield pending
    pending = raw.read(BUFFER)
  while pending:
    # Require a stream of the same format as the first.
    pending += raw.read(len(magic))
    if not pending.startswith(magic):
      raise tarfile.ReadError("other data follow its compressed stream")
    decompressor = DECOMPRESSORS[magic]()
    while not decompressor.eof:
      # zlib returns input that it did not use; the others keep it.
      is_end = False
      if not pending and getattr(decompressor, "needs_input", True):
        pending = raw.read(CHUNK)
        is_end = not pending
      content = decompressor.decompress(pending, BUFFER)
      pending = getattr(decompressor, "unconsumed_tail", b"")
      if content:
        yield content
      elif is_end and not decompressor.eof:
        raise EOFError("the compressed stream has no end")
    # Skip zeros behind the stream.
    pending = decompressor.unused_data.lstrip(b"\0")
    while not pending and (more := raw.read(CHUNK)):
      pending = more.lstrip(b"\0")


class Reader:
  """Reads the content of a file forwards, decompressed, and counts its bytes.

  Has the methods of a file that tarfile needs: `read`, `seek` and `tell`.

  Attributes:
    is_compressed: True for a compressed file.
    place: description of the place in the file, for messages.
  """

  def __init__(self, raw: Any, max_bytes: int) -> None:
    start = raw.read(CHUNK)
    magic = next((m for m in DECOMPRESSORS if start.startswith(m)), b"")
    self._parts = _decompress(raw, start, magic)
    self._part = io.BytesIO()
    self._max_bytes = max_bytes
    self._position = 0
    self.is_compressed = bool(magic)
    self.place = ""

  def tell(self) -> int:
    """Returns the number of decompressed bytes that were read."""
    return self._position

  def read_some(self, size: int = BUFFER) -> bytes:
    """Returns `size` bytes, fewer only at the end of the file.

    Raises:
      TooLargeError: if there are more than `max_bytes`.
    """
    content = self._part.read(size)
    while len(content) < size and (part := next(self._parts, b"")):
      self._part = io.BytesIO(part)
      content += self._part.read(size - len(content))
    self._position += len(content)
    if self._position > self._max_bytes:
      raise TooLargeError
    return content

  def read(self, size: int) -> bytes:
    """Returns `size` bytes, at once: `size` must be small.

    Raises:
      TooLargeError: if there are more than `max_bytes`.
      tarfile.ReadError: if the file ends before.
    """
    content = self.read_some(size)
    if len(content) < size:
      raise self.error("ends before its end mark")
    return content

  def peek(self, size: int) -> bytes:
    """Returns the next bytes as `read`, which `read` then returns again."""
    content = self.read(size)
    self._position -= size
    # Join the parts only if the bytes come from several.
    if self._part.tell() < size:
      self._part = io.BytesIO(content + self._part.read())
    else:
      self._part.seek(-size, io.SEEK_CUR)
    return content

  def chunks(self, size: int) -> Iterator[bytes]:
    """Yields `size` bytes in parts of at most `BUFFER` bytes."""
    if self._position + size > self._max_bytes:
      raise TooLargeError
    while size > 0:
      chunk = self.read(min(size, BUFFER))
      size -= len(chunk)
      yield chunk

  def seek(self, position: int) -> None:
    """Skips all bytes up to a later position."""
    for _ in self.chunks(position - self._position):
      pass

  def error(self, problem: str) -> tarfile.ReadError:
    """Returns the error for a problem, with its place in the file."""
    return tarfile.ReadError(f"it {problem}{self.place}, byte {self.tell():,}")


def read_file(raw: Any, max_bytes: int) -> Iterator[bytes]:
  """Yields the content of a file that is no tar, decompressed.

  Args:
    raw: the file, opened in binary mode at its beginning.
    max_bytes: largest allowed size of the decompressed content.

  Raises:
    TooLargeError: for more than `max_bytes`.
    EOFError, OSError, zlib.error, lzma.LZMAError: for a damaged file.
  """
  return iter(Reader(raw, max_bytes).read_some, b"")
