"""Reads plain and compressed files to their end, within a limit of size.

The files of Python's gzip, bz2 and lzma do not suffice: they ignore data after
the compressed stream of a bz2 or xz, and an xz can make them allocate any
amount of memory.

Source: RFC 1952 for the data that may follow a gzip stream.
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
  """Error of a file that unpacks to more bytes than allowed."""


# Decompressors by the first bytes of a file.
DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
  b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),  # Verifies the trailer.
  b"BZh": bz2.BZ2Decompressor,
  b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(
    lzma.FORMAT_XZ, memlimit=MAX_DICTIONARY
  ),
}


def is_compressed(start: bytes) -> bool:
  """Returns True if `start` begins like a compressed file."""
  return start.startswith(tuple(DECOMPRESSORS))


def _decompress(raw: Any, start: bytes, magic: bytes) -> Iterator[bytes]:
  """Yields the content of a file in parts of at most `BUFFER` bytes.

  Verifies the checksum of every compressed stream at its end. A stream may be
  followed by zeros, as on tapes, or by another stream, as parallel compressors
  write.

  Args:
    raw: file that is open in binary mode, from which `start` has been read.
    start: first bytes of the file.
    magic: key of `DECOMPRESSORS` with which `start` begins; b"" for a file that
      is not compressed.

  Raises:
    EOFError: if a compressed stream has no end.
    OSError, tarfile.ReadError, zlib.error, lzma.LZMAError: for damaged content.
  """
  # Yield a plain file unchanged.
  pending = start
  while pending and not magic:
    yield pending
    pending = raw.read(BUFFER)
  while pending:
    # Require a stream of the same format as the first one.
    pending += raw.read(len(magic))
    if not pending.startswith(magic):
      raise tarfile.ReadError("other data follow its compressed stream")
    decompressor = DECOMPRESSORS[magic]()
    while not decompressor.eof:
      # zlib returns the input that it did not use; the others keep it.
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
    # Skip zeros after the stream.
    pending = decompressor.unused_data.lstrip(b"\0")
    while not pending and (more := raw.read(CHUNK)):
      pending = more.lstrip(b"\0")


class Reader:
  """Reads the decompressed content of a file forwards, and counts its bytes.

  Has the file methods that tarfile needs: `read`, `seek` and `tell`.

  Attributes:
    is_compressed: True for a compressed file.
    place: description of the current place in the file, for messages.
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
    """Returns the number of decompressed bytes read so far."""
    return self._position

  def read_some(self, size: int = BUFFER) -> bytes:
    """Returns `size` bytes, or fewer at the end of the file.

    Raises:
      TooLargeError: if more than `max_bytes` have been read.
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
    """Returns exactly `size` bytes in memory: `size` must be small.

    Raises:
      TooLargeError: if more than `max_bytes` have been read.
      tarfile.ReadError: if the file has fewer bytes left.
    """
    content = self.read_some(size)
    if len(content) < size:
      raise self.error("ends before its end mark")
    return content

  def peek(self, size: int) -> bytes:
    """Returns the next `size` bytes without moving the position."""
    content = self.read(size)
    self._position -= size
    # Step back, or join the parts if the bytes come from several parts.
    if self._part.tell() < size:
      self._part = io.BytesIO(content + self._part.read())
    else:
      self._part.seek(-size, io.SEEK_CUR)
    return content

  def chunks(self, size: int) -> Iterator[bytes]:
    """Yields `size` bytes in parts of at most `BUFFER` bytes."""
    # Refuse the size before anything is read: a header may claim any size.
    if self._position + size > self._max_bytes:
      raise TooLargeError
    while size > 0:
      chunk = self.read(min(size, BUFFER))
      size -= len(chunk)
      yield chunk

  def seek(self, position: int) -> None:
    """Skips the bytes up to a later position."""
    for _ in self.chunks(position - self._position):
      pass

  def error(self, problem: str) -> tarfile.ReadError:
    """Returns the error for a problem, with the place in the file."""
    return tarfile.ReadError(f"it {problem}{self.place}, byte {self.tell():,}")


def read_file(raw: Any, max_bytes: int) -> Iterator[bytes]:
  """Yields the decompressed content of a file that is not a tar.

  Args:
    raw: file that is open in binary mode, at its beginning.
    max_bytes: largest allowed size of the decompressed content.

  Raises:
    TooLargeError: for more than `max_bytes`.
    EOFError, OSError, zlib.error, lzma.LZMAError: for a damaged file.
  """
  return iter(Reader(raw, max_bytes).read_some, b"")
