"""Tar archives, plain or compressed, read as a stream and to their end.

Python's tarfile takes a damaged header for the end of the archive. It also
stops at the end mark, before the checksum of a gzip. This reader always reads
to the last byte of the file. Headers are parsed by tarfile, one block each;
their extensions are read in a loop and are limited in size and number.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block";
RFC 1952 for what may follow a gzip.
"""

from __future__ import annotations

import bz2
import collections
import io
import itertools
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


# Decompressors by the first bytes of a file.
DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
  b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),  # Verifies the trailer.
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
  if is_compressed(start) or start[257:262] == b"ustar":
    return True
  # Tars from before POSIX do not name their format; their headers have a
  # checksum, which tarfile verifies.
  try:
    tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
  except tarfile.HeaderError:
    return False
  return True


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


def is_compressed(start: bytes) -> bool:
  """Returns True for the first bytes of a compressed file."""
  return start.startswith(tuple(DECOMPRESSORS))


def is_compressed_tar(raw: Any) -> bool:
  """Returns True if a compressed file is a tar; False for other content.

  Args:
    raw: the file, opened in binary mode at its beginning.

  Raises:
    EOFError, OSError, zlib.error, lzma.LZMAError: for a damaged file.
  """
  return is_tar(_Reader(raw, RECORD).read_some(BLOCK))


def read_file(raw: Any, max_bytes: int) -> Iterator[bytes]:
  """Yields the content of a file that is no tar, decompressed.

  Args:
    raw: the file, opened in binary mode at its beginning.
    max_bytes: largest allowed size of the decompressed content.

  Raises:
    TooLargeError: for more than `max_bytes`.
    EOFError, OSError, zlib.error, lzma.LZMAError: for a damaged file.
  """
  return iter(_Reader(raw, max_bytes).read_some, b"")


def read_members(
  raw: Any, *, max_bytes: int, wanted: Callable[[tarfile.TarInfo], bool]
) -> Iterator[tuple[str, Iterator[bytes]]]:
  """Yields (name, parts) of every wanted file of a tar, in its order.

  The parts of a file can be read until the next file is asked for. A damaged
  header may claim any size; parts take no more memory than the file has bytes.
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
  # Read header after header; global pax headers hold for all that follow.
  reader = _Reader(raw, max_bytes)
  global_fields: dict[bytes, bytes] = {}
  while (member := _next_member(reader, global_fields)) is not None:
    # Ignore the size in a header of a link or a folder: they have no content.
    is_stored = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
    size = member.size if is_stored else 0
    reader.name = member.name
    parts = reader.chunks(size)
    if wanted(member) and member.isfile():
      yield member.name, parts
    _exhaust(parts)
    _exhaust(reader.chunks(-size % BLOCK))  # The padding to a full block.
  _check_end(reader)


def _exhaust(parts: Iterator[bytes]) -> None:
  """Skips the parts that were not read."""
  collections.deque(parts, maxlen=0)


class _Reader:
  """Reads exact numbers of decompressed bytes of a file.

  Attributes:
    is_compressed: True for a compressed file.
    position: decompressed bytes read so far.
    name: name of the last member, for messages.
  """

  def __init__(self, raw: Any, max_bytes: int) -> None:
    start = raw.read(CHUNK)
    magic = next((m for m in DECOMPRESSORS if start.startswith(m)), b"")
    self._parts = _decompress(raw, start, magic)
    self._part = io.BytesIO()
    self._max_bytes = max_bytes
    self.is_compressed = bool(magic)
    self.position = 0
    self.name = ""

  def read_some(self, size: int = BUFFER) -> bytes:
    """Returns `size` bytes, fewer only at the end of the file.

    Raises:
      TooLargeError: if there are more than `max_bytes`.
    """
    content = self._part.read(size)
    while len(content) < size and (part := next(self._parts, b"")):
      self._part = io.BytesIO(part)
      content += self._part.read(size - len(content))
    self.position += len(content)
    if self.position > self._max_bytes:
      raise TooLargeError
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

  def chunks(self, size: int) -> Iterator[bytes]:
    """Yields `size` bytes in parts of at most `BUFFER` bytes."""
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
    is_sound = content[stop - 1 : stop] == b"\n"
    if not (record and is_sound and record.end() < stop <= len(content)):
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


def _check_end(reader: _Reader) -> None:
  """Reads to the end, and raises for other data than zeros.

  POSIX does not define what fills the last record behind the end mark. In a
  compressed file, which has a checksum, it may be anything but another header.
  """
  if reader.read_exactly(BLOCK, "its end mark") != ZEROS:
    raise reader.error("has an end mark of one block instead of two")
  # Check the rest of the last record, then whatever follows it.
  rest = reader.read_some(-reader.position % RECORD)
  if reader.is_compressed and b"ustar" not in rest:
    rest = b""
  parts = itertools.chain([rest], iter(reader.read_some, b""))
  if any(part.strip(b"\0") for part in parts):
    raise reader.error("has other data than zeros behind its end mark")
