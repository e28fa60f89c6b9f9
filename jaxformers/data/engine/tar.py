"""Tar archives, plain or compressed, read as a stream and to their end.

Headers are read by Python's tarfile, whose streaming mode alone is not enough:
it takes a damaged header for the end of the archive, stops at the end mark,
before the checksum of a gzip, and ignores damaged records of a pax header. The
checks for these are here.

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
MAX_HEADER = 1 << 20  # Bytes of a header and of its extensions.
PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENSION_TYPES = (
  tarfile.GNUTYPE_LONGNAME,
  tarfile.GNUTYPE_LONGLINK,
  *PAX_TYPES,
)
PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")


def is_tar(start: bytes) -> bool:
  """Returns True for the first bytes of a tar, plain or compressed.

  Args:
    start: the first `BLOCK` bytes of the file, fewer for a shorter file.
  """
  if streams.is_compressed(start) or start[257:262] == b"ustar":
    return True
  # Tars from before POSIX do not name their format; their headers have a
  # checksum, which tarfile verifies.
  try:
    tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
  except tarfile.HeaderError:
    return False
  return True


def is_compressed_tar(raw: Any) -> bool:
  """Returns True if a compressed file is a tar; False for other content.

  Args:
    raw: the file, opened in binary mode at its beginning.

  Raises:
    EOFError, OSError, zlib.error, lzma.LZMAError: for a damaged file.
  """
  return is_tar(streams.Reader(raw, RECORD).read_some(BLOCK))


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
    streams.TooLargeError: for more than `max_bytes`.
    tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError: for a
      damaged archive; see `streams.DAMAGE`.
  """
  reader = streams.Reader(raw, max_bytes)
  archive: Any = tarfile.TarFile(
    fileobj=cast(Any, reader), tarinfo=_Header, encoding="utf-8"
  )
  while (member := archive.next()) is not None:
    archive.members.clear()  # tarfile would keep all of them in memory.
    reader.place = f" in the middle of {member.name!r}"
    if wanted(member) and member.isfile():
      if member.type == tarfile.GNUTYPE_SPARSE:
        raise reader.error("has a sparse file")
      yield member.name, reader.chunks(member.size)
    reader.place = f" after {member.name!r}"
  _check_end(reader)


_TarInfo: Any = tarfile.TarInfo  # Its types lack what subclasses override.


class _Header(_TarInfo):
  """A header that raises ReadError for damage, where tarfile would stop."""

  @classmethod
  def fromtarfile(cls, archive: Any) -> tarfile.TarInfo:
    """Returns the next member, its extensions applied."""
    try:
      return super().fromtarfile(archive)
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # No stub.
      raise  # The end mark, at which tarfile stops.
    except (tarfile.HeaderError, ValueError, RecursionError) as error:
      problem = f"has a damaged header ({error})"
      raise archive.fileobj.error(problem) from None

  def _proc_member(self, archive: Any) -> tarfile.TarInfo:
    # tarfile calls this for every header, and names it as the method that
    # subclasses override. For an extension it calls `fromtarfile` in turn.
    reader = archive.fileobj
    if self.size < 0:
      raise reader.error(f"has a header with the size {self.size}")
    # Leave sparse files as they are: `read_members` refuses them.
    if self.type == tarfile.GNUTYPE_SPARSE:
      return self
    if self.type not in EXTENSION_TYPES:
      return super()._proc_member(archive)
    # Refuse large extensions before they are read; tarfile.offset is where the
    # first extension of the member began.
    if reader.tell() + self.size - archive.offset > MAX_HEADER:
      raise reader.error(
        f"has an extension of a header of {self.size:,} bytes (at most "
        f"{MAX_HEADER:,} are read)"
      )
    if self.type in PAX_TYPES and _is_sparse(reader, reader.peek(self.size)):
      reader.seek(reader.tell() + self.size + -self.size % BLOCK)
      member = self.fromtarfile(archive)
      member.type = tarfile.GNUTYPE_SPARSE
      return member
    return super()._proc_member(archive)


def _is_sparse(reader: streams.Reader, content: bytes) -> bool:
  """Returns True if a pax header describes a sparse file.

  Raises:
    tarfile.ReadError: if it does not consist of records "LENGTH KEY=VALUE\\n",
      or has a size that is no number; tarfile would ignore both.
  """
  is_sparse, start = False, 0
  while start < len(content):
    # LENGTH counts the whole record, its own digits and the line end included.
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
  """Reads to the end, and raises for other data than zeros.

  POSIX does not define what fills the last record behind the end mark. In a
  compressed file, which has a checksum, it may be anything but another header.
  """
  if reader.read(BLOCK) != ZEROS:
    raise reader.error("has an end mark of one block instead of two")
  # Check the rest of the last record, then whatever follows it.
  rest = reader.read_some(-reader.tell() % RECORD)
  if reader.is_compressed and b"ustar" not in rest:
    rest = b""
  parts = itertools.chain([rest], iter(reader.read_some, b""))
  if any(part.strip(b"\0") for part in parts):
    raise reader.error("has other data than zeros behind its end mark")
