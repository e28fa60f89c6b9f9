"""Tar archives, plain or compressed, read as a stream and to their end.

Python's tarfile stops silently at a damaged header and leaves what follows the
end mark unread, so that a gzip's checksum is never compared. This reader always
reads to the last byte of the file. Headers are parsed by tarfile, one block
each; their extensions are read in a loop and are limited in size and number.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block";
RFC 1952 for what may follow a gzip.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

BLOCK = 512
RECORD = 20 * BLOCK  # Tars are padded to a multiple of a record.
ZEROS = bytes(BLOCK)
CHUNK = 1 << 18  # Bytes of a compressed file that are read at a time.
BUFFER = 1 << 20  # Bytes that are decompressed at a time.
MAX_EXTENSION = 1 << 20  # Bytes of a long name or of a pax header.
MAX_EXTENSIONS = 16  # In front of one member; real archives have three.
MAX_DICTIONARY = 1 << 30  # Bytes of memory that an xz may ask for.
LONG_NAMES = {
  tarfile.GNUTYPE_LONGNAME: b"path",
  tarfile.GNUTYPE_LONGLINK: b"linkpath",
}
PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")

# Errors of `read_members` for a damaged archive.
DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


class TooLargeError(Exception):
  """An archive that unpacks to more bytes than are allowed."""


class _Gzip:
  """Decompressor of one gzip member, with the interface of bz2's and lzma's."""

  def __init__(self) -> None:
    self._inflate = zlib.decompressobj(wbits=31)  # 31: verify the trailer.

  @property
  def eof(self) -> bool:
    """True once the trailer was read and agrees with the content."""
    return self._inflate.eof

  @property
  def unused_data(self) -> bytes:
    """Bytes of the input behind the trailer."""
    return self._inflate.unused_data

  @property
  def needs_input(self) -> bool:
    """True if all input has been decompressed."""
    return not self._inflate.unconsumed_tail

  def decompress(self, content: bytes, max_length: int) -> bytes:
    """Returns at most `max_length` bytes; keeps what it did not read."""
    pending = self._inflate.unconsumed_tail
    return self._inflate.decompress(pending + content, max_length)


# Decompressors by the first bytes of a file.
DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
  b"\x1f\x8b": _Gzip,
  b"BZh": bz2.BZ2Decompressor,
  b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(
    lzma.FORMAT_XZ, memlimit=MAX_DICTIONARY
  ),
}


def is_tar(start: bytes) -> bool:
  """Returns True for the first bytes of a tar, plain or compressed.

  Args:
    start: the first `BLOCK` bytes of the file, fewer for a shorter file.
  """
  if start.startswith(tuple(DECOMPRESSORS)) or start[257:262] == b"ustar":
    return True
  # Tars from before POSIX do not name their format; their headers have a
  # checksum, which tarfile verifies.
  try:
    tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
  except tarfile.HeaderError:
    return False
  return True


class Stream(io.RawIOBase):
  """Content of a file, decompressed by the format of its first bytes.

  The checksum of every compressed stream is verified at its end. Zeros may
  follow it, as on tapes, or another stream, as parallel compressors write.

  Args:
    raw: the file, opened in binary mode at its beginning.
    max_bytes: largest allowed size of the decompressed content.
  """

  def __init__(self, raw: Any, max_bytes: int) -> None:
    # The first bytes tell the format; they are input as well.
    start = raw.read(CHUNK)
    self._raw, self._input, self._left = raw, start, max_bytes
    self._magic = next((m for m in DECOMPRESSORS if start.startswith(m)), b"")
    self.is_compressed = bool(self._magic)
    if self.is_compressed:
      self._decompressor = DECOMPRESSORS[self._magic]()

  def readable(self) -> bool:
    """Always True."""
    return True

  def readinto(self, buffer: Any) -> int:
    """Fills a part of the buffer; 0 at the end of the file.

    Raises:
      TooLargeError: once there are more than `max_bytes`.
      EOFError: if a compressed stream has no end.
      OSError, zlib.error, lzma.LZMAError: for damaged content.
    """
    # Ask for one byte more than is allowed, to see if there is one.
    size = min(len(buffer), self._left + 1)
    content = self._decompress(size) if self.is_compressed else self._take(size)
    self._left -= len(content)
    if self._left < 0:
      raise TooLargeError
    buffer[: len(content)] = content
    return len(content)

  def _take(self, size: int) -> bytes:
    """Returns at most `size` bytes of the file as they are."""
    content = self._input or self._raw.read(max(size, CHUNK))
    self._input = content[size:]
    return content[:size]

  def _decompress(self, size: int) -> bytes:
    """Returns 1 to `size` decompressed bytes, or b"" at the end of the file."""
    while True:
      # Continue with the next compressed stream, if there is one.
      if self._decompressor.eof and not self._next_stream():
        return b""
      # Read more of the file once the decompressor has used up its input.
      if self._decompressor.needs_input and not self._input:
        self._input = self._raw.read(CHUNK)
        is_end = not self._input
      else:
        is_end = False
      compressed, self._input = self._input, b""
      content = self._decompressor.decompress(compressed, size)
      if content:
        return content
      if is_end and not self._decompressor.eof:
        raise EOFError("the compressed stream has no end")

  def _next_stream(self) -> bool:
    """Starts on the stream that follows; returns False if none does."""
    # Skip zeros.
    rest = self._decompressor.unused_data.lstrip(b"\0")
    while not rest and (more := self._raw.read(CHUNK)):
      rest = more.lstrip(b"\0")
    if not rest:
      return False
    # Require another stream of the same format.
    rest += self._raw.read(len(self._magic))
    if not rest.startswith(self._magic):
      raise tarfile.ReadError("other data follow its compressed stream")
    self._decompressor = DECOMPRESSORS[self._magic]()
    self._input = rest
    return True


def read_members(
  raw: Any, *, max_bytes: int, wanted: Callable[[tarfile.TarInfo], bool]
) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) of every wanted file of a tar, in its order.

  Trust the content only once the iterator has ended: the checksum of a
  compressed file is its last bytes.

  Args:
    raw: the file, opened in binary mode at its beginning.
    max_bytes: largest allowed size of the decompressed content.
    wanted: returns True for a member to read; called for all, and may raise.

  Raises:
    TooLargeError: for more than `max_bytes`.
    tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError: for a
      damaged archive; see `DAMAGE`.
  """
  # Read header after header; pax headers may hold for all that follow.
  stream = Stream(raw, max_bytes)
  reader = _Reader(stream, max_bytes)
  global_fields: dict[bytes, bytes] = {}
  while (member := _next_member(reader, global_fields)) is not None:
    # Links and folders have no content, whatever size their header claims.
    is_stored = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
    size = member.size if is_stored else 0
    reader.name = member.name
    if wanted(member) and member.isfile():
      yield member.name, reader.read_content(size)
    else:
      reader.skip(size)
    reader.skip(-size % BLOCK)  # The padding to a full block.
  _check_end(reader, stream.is_compressed)


class _Reader:
  """Reads exact numbers of bytes from a stream.

  Attributes:
    position: bytes read so far.
    name: name of the last member, for messages.
  """

  def __init__(self, stream: Stream, max_bytes: int) -> None:
    self._stream = io.BufferedReader(stream, BUFFER)
    self._max_bytes = max_bytes
    self.position = 0
    self.name = ""

  def read_some(self, size: int = BUFFER) -> bytes:
    """Returns `size` bytes, fewer only at the end."""
    content = self._stream.read(size)
    self.position += len(content)
    return content

  def read_exactly(self, size: int, what: str) -> bytes:
    """Returns `size` bytes, at once: `size` must be small.

    Args:
      size: number of bytes.
      what: part of the archive that they are, for the message.
    """
    content = self.read_some(size)
    if len(content) < size:
      raise self.error(f"ends in the middle of {what}")
    return content

  def read_content(self, size: int) -> bytes:
    """Returns the content of a member.

    A damaged header may claim any size, so large content is read in chunks: no
    more memory is used than the file has bytes.
    """
    if size <= BUFFER:
      return self.read_exactly(size, repr(self.name))
    content = io.BytesIO()
    for chunk in self._chunks(size):
      content.write(chunk)
    return content.getvalue()

  def skip(self, size: int) -> None:
    """Skips content or padding."""
    for _ in self._chunks(size):
      pass

  def _chunks(self, size: int) -> Iterator[bytes]:
    if self.position + size > self._max_bytes:
      raise TooLargeError
    while size:
      chunk = self.read_exactly(min(size, BUFFER), repr(self.name))
      size -= len(chunk)
      yield chunk

  def error(self, problem: str) -> tarfile.ReadError:
    """Returns the error for a problem, with its place in the archive."""
    place = f" after {self.name!r}" if self.name else ""
    return tarfile.ReadError(f"it {problem}{place}, byte {self.position:,}")


def _next_member(
  reader: _Reader, global_fields: dict[bytes, bytes]
) -> tarfile.TarInfo | None:
  """Returns the next member, its extensions applied; None at the end mark."""
  fields: dict[bytes, bytes] = {}
  for _ in range(MAX_EXTENSIONS + 1):
    member = _read_header(reader)
    if member is None:
      if fields:
        raise reader.error("has an extension without a member")
      return None
    # Extensions come before the member whose fields they replace.
    if member.type in LONG_NAMES:
      content = _read_extension(reader, member)
      fields[LONG_NAMES[member.type]] = content.partition(b"\0")[0]
    elif member.type in PAX_TYPES:
      content = _read_extension(reader, member)
      # Global fields hold for all members that follow, others for the next.
      is_global = member.type == tarfile.XGLTYPE
      (global_fields if is_global else fields).update(_fields(reader, content))
    else:
      _apply(reader, member, global_fields | fields)
      return member
  raise reader.error(f"has more than {MAX_EXTENSIONS} extensions of a header")


def _read_header(reader: _Reader) -> tarfile.TarInfo | None:
  """Returns the header in the next block; None for a block of zeros."""
  block = reader.read_exactly(BLOCK, "a header, or has no end mark")
  if block == ZEROS:
    return None
  try:
    member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
  except tarfile.HeaderError as error:
    raise reader.error(f"has a damaged header ({error})") from None
  if member.size < 0:
    raise reader.error(f"has a header with the size {member.size}")
  return member


def _read_extension(reader: _Reader, member: tarfile.TarInfo) -> bytes:
  """Returns the content of an extension, a long name or a pax header."""
  if member.size > MAX_EXTENSION:
    raise reader.error(
      f"has an extension of a header of {member.size:,} bytes (at most "
      f"{MAX_EXTENSION:,} are read)"
    )
  padded = member.size + -member.size % BLOCK
  return reader.read_exactly(padded, "a header")[: member.size]


def _fields(reader: _Reader, content: bytes) -> dict[bytes, bytes]:
  """Returns the fields of a pax header, records of "LENGTH KEY=VALUE\\n"."""
  fields, start = {}, 0
  while start < len(content):
    # LENGTH counts the whole record, its own digits and the line end included.
    record = PAX_RECORD.match(content, start)
    stop = start + int(record[1]) if record else 0
    is_sound = record and record.end() < stop <= len(content)
    if not is_sound or content[stop - 1 : stop] != b"\n":
      raise reader.error("has a damaged pax header")
    fields[record[2]] = content[record.end() : stop - 1]
    start = stop
  return fields


def _apply(
  reader: _Reader, member: tarfile.TarInfo, fields: dict[bytes, bytes]
) -> None:
  """Replaces name, target and size of a member by those of its extensions.

  Args:
    reader: reader of the archive, for messages.
    member: header to change.
    fields: fields of the extensions, global ones included.
  """
  for key, attribute in ((b"path", "name"), (b"linkpath", "linkname")):
    if key in fields:
      value = fields[key].decode("utf-8", "surrogateescape")
      setattr(member, attribute, value.rstrip("/"))
  # Sizes of 8 GB and more do not fit into a plain header.
  if b"size" in fields:
    if not re.fullmatch(rb"\d{1,18}", fields[b"size"]):
      raise reader.error(f"has a pax header with the size {fields[b'size']!r}")
    member.size = int(fields[b"size"])
  # Mark a sparse file as such, however its holes are described.
  if any(key.startswith(b"GNU.sparse.") for key in fields):
    member.type = tarfile.GNUTYPE_SPARSE


def _check_end(reader: _Reader, is_compressed: bool) -> None:
  """Reads to the end, and raises for more than zeros behind the end mark.

  POSIX leaves the rest of the last record undefined. In a compressed file,
  whose checksum excludes damage, anything but another header is accepted there.
  """
  if reader.read_exactly(BLOCK, "its end mark") != ZEROS:
    raise reader.error("has an end mark of one block instead of two")
  # Check the rest of the last record, then whatever follows it.
  rest = reader.read_some(-reader.position % RECORD)
  if rest.strip(b"\0") and (not is_compressed or b"ustar" in rest):
    raise reader.error("has other data than zeros behind its end mark")
  while content := reader.read_some():
    if content.strip(b"\0"):
      raise reader.error("has other data than zeros behind its end mark")
