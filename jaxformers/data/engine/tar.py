"""Reads tar archives, plain or compressed, as a stream and to their end.

Python's tarfile parses the headers. Its streaming mode does not suffice: it
takes a damaged header for the end of the archive, stops at the end mark, before
the checksum of a gzip, and ignores damaged records of a pax header. This module
adds checks for all three.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block".
"""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, cast

from jaxformers.data.engine import streams

BLOCK = tarfile.BLOCKSIZE
RECORD = tarfile.RECORDSIZE  # Tars are padded to a multiple of a record.
ZEROS = bytes(BLOCK)
MAX_HEADER = 1 << 20  # Largest size of a header with its extensions, in bytes.
PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENSION_TYPES = (
  tarfile.GNUTYPE_LONGNAME,
  tarfile.GNUTYPE_LONGLINK,
  *PAX_TYPES,
)
PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")


def is_tar(start: bytes) -> bool:
  """Returns True if a file may be a tar, plain or compressed.

  Args:
    start: first `BLOCK` bytes of the file; fewer for a shorter file.
  """
  if streams.is_compressed(start) or start[257:262] == b"ustar":
    return True
  # Tars from before POSIX do not name their format, but their headers have a
  # checksum, which tarfile verifies.
  try:
    tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
  except tarfile.HeaderError:
    return False
  return True


def is_compressed_tar(raw: Any) -> bool:
  """Returns True if the content of a compressed file is a tar.

  Args:
    raw: file that is open in binary mode, at its beginning.

  Raises:
    EOFError, OSError, zlib.error, lzma.LZMAError: for a damaged file.
  """
  return is_tar(streams.Reader(raw, RECORD).read_some(BLOCK))


def read_members(
  raw: Any, *, max_bytes: int, wanted: Callable[[tarfile.TarInfo], bool]
) -> Iterator[tuple[str, Iterator[bytes]]]:
  """Yields (name, parts) of every wanted file of a tar, in the tar's order.

  Read the parts of a file before you request the next file. Parts never take
  more memory than the file has bytes, even if a damaged header claims more.
  Trust the content only after the iterator has ended: the checksum of a
  compressed file is in its last bytes.

  Args:
    raw: file that is open in binary mode, at its beginning.
    max_bytes: largest allowed size of the decompressed content.
    wanted: function that returns True for a member to read. It is called for
      all members, and may raise an error.

  Raises:
    streams.TooLargeError: for more than `max_bytes`.
    tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError: for a
      damaged archive; see `streams.DAMAGE`.
  """
  reader = streams.Reader(raw, max_bytes)
  archive: Any = tarfile.TarFile(
    fileobj=cast(Any, reader), tarinfo=_Header, encoding="utf-8"
  )
  # Yield the members one by one, and note the place for messages.
  while (member := archive.next()) is not None:
    archive.members.clear()  # tarfile would keep all of them in memory.
    reader.place = f" in the middle of {member.name!r}"
    if wanted(member) and member.isfile():
      if member.type == tarfile.GNUTYPE_SPARSE:
        raise reader.error("has a sparse file")
      yield member.name, reader.chunks(member.size)
    reader.place = f" after {member.name!r}"
  _check_end(reader)


_TarInfo: Any = tarfile.TarInfo  # Its stubs lack the overridden methods.


class _Header(_TarInfo):
  """Header that raises ReadError for damage; tarfile would silently stop."""

  @classmethod
  def fromtarfile(cls, archive: Any) -> tarfile.TarInfo:
    """Returns the next member with its extensions applied."""
    try:
      return super().fromtarfile(archive)
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # No stub.
      raise  # The end mark, at which tarfile stops.
    except (tarfile.HeaderError, ValueError, RecursionError) as error:
      problem = f"has a damaged header ({error})"
      raise archive.fileobj.error(problem) from None

  def _proc_member(self, archive: Any) -> tarfile.TarInfo:
    # tarfile calls this method for every header, and documents that subclasses
    # may override it. For an extension, the method calls `fromtarfile` again.
    reader = archive.fileobj
    if self.size < 0:
      raise reader.error(f"has a header with the size {self.size}")
    # Return sparse files unchanged: `read_members` refuses them.
    if self.type == tarfile.GNUTYPE_SPARSE:
      return self
    if self.type not in EXTENSION_TYPES:
      return super()._proc_member(archive)
    # Refuse large extensions before they are read; `archive.offset` is the
    # place where the first extension of the member begins.
    if reader.tell() + self.size - archive.offset > MAX_HEADER:
      raise reader.error(
        f"has an extension of a header of {self.size:,} bytes (at most "
        f"{MAX_HEADER:,} are read)"
      )
    # Mark a file whose pax header describes a sparse file.
    if self.type in PAX_TYPES and _is_sparse(reader, reader.peek(self.size)):
      reader.seek(reader.tell() + self.size + -self.size % BLOCK)
      member = self.fromtarfile(archive)
      member.type = tarfile.GNUTYPE_SPARSE
      return member
    return super()._proc_member(archive)


def _is_sparse(reader: streams.Reader, content: bytes) -> bool:
  """Returns True if a pax header describes a sparse file.

  Raises:
    tarfile.ReadError: if the header does not consist of records "LENGTH
      KEY=VALUE\\n", or if its size is not a number; tarfile ignores both.
  """
  is_sparse, start = False, 0
  while start < len(content):
    # LENGTH counts the whole record, including its digits and the line end.
    record = PAX_RECORD.match(content, start)
    stop = start + int(record[1]) if record else 0
    is_sound = content[stop - 1 : stop] == b"\n"
    if not (record and is_sound and record.end() < stop <= len(content)):
      raise reader.error("has a damaged pax header")
    value = content[record.end() : stop - 1]
    if record[2] == b"size" and not re.fullmatch(rb"\d{1,18}", value):
      raise reader.error(f"has a pax header with the size {value[:20]!r}")
    is_sparse |= record[2].startswith(b"GNU.sparse.")
    start = stop
  return is_sparse


def _check_end(reader: streams.Reader) -> None:
  """Reads to the end; raises ReadError for data other than zeros.

  POSIX does not define the content of the last record after the end mark. In a
  compressed file, which has a checksum, it may be anything but another header.
  """
  if reader.read(BLOCK) != ZEROS:
    raise reader.error("has an end mark of one block instead of two")
  # Check the rest of the last record, then all data after it.
  rest = reader.read_some(-reader.tell() % RECORD)
  if reader.is_compressed and b"ustar" not in rest:
    rest = b""
  parts = itertools.chain([rest], iter(reader.read_some, b""))
  if any(part.strip(b"\0") for part in parts):
    raise reader.error("has other data than zeros behind its end mark")
