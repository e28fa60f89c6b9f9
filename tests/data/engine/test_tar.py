"""Headers and ends of tars, well-formed and not."""

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc

import pytest

from jaxformers.data.engine import streams, tar

LONG = "a/" + "b" * 150 + "/\u00e9" + "c" * 150 + ".txt"
FILES = {"one.txt": b"1" * 700, LONG: b"2" * 3, "big": bytes(3 << 20)}
END = bytes(1_024)


def header(name="x", size=0, kind=tarfile.REGTYPE, stored_size=None):
  """A block; `stored_size` replaces the 12 bytes of the size."""
  member = tarfile.TarInfo(name)
  member.size, member.type = size, kind
  block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
  if stored_size is not None:
    block[124:136] = stored_size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
  return bytes(block)


def extension(kind, content):
  size = len(content)
  return header("ext", size, kind) + content + bytes(-size % 512)


def pax(**fields):
  """A pax header for the next member."""
  content = b""
  for key, value in fields.items():
    record = f" {key.replace('_', '.')}={value}\n".encode()
    size = len(record) + 2
    content += (b"%d" % (size if size > 9 else size - 1)) + record
  return extension(tarfile.XHDTYPE, content)


def read(content, max_bytes=1 << 30):
  stream = io.BytesIO(content)
  members = tar.read_members(
    stream, max_bytes=max_bytes, wanted=lambda member: True
  )
  return {name: b"".join(parts) for name, parts in members}


def packed(files=FILES, form=tarfile.PAX_FORMAT):
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode="w", format=form) as archive:
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size, member.mtime = len(content), 1.5
      archive.addfile(member, io.BytesIO(content))
    archive.addfile(tarfile.TarInfo("empty"))
  return file.getvalue()


@pytest.mark.parametrize("buffer_size", [100, 1 << 20])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize(
  "compress", [bytes, gzip.compress, bz2.compress, lzma.compress]
)
def test_tar_read_returns_names_and_contents(
  monkeypatch, form, compress, buffer_size
):
  monkeypatch.setattr(streams, "CHUNK", buffer_size)
  monkeypatch.setattr(streams, "BUFFER", buffer_size)
  sound = packed(form=form)
  assert tar.is_tar(compress(sound)[:512])
  assert read(compress(sound)) == FILES | {"empty": b""}
  # Parallel compressors write several streams, and tapes are padded.
  if compress is not bytes:
    half = len(sound) // 2
    both = compress(sound[:half]) + compress(sound[half:])
    assert read(both + bytes(2_048)) == FILES | {"empty": b""}


def test_tar_read_gives_directories_and_links_no_content():
  folder = header("folder/", kind=tarfile.DIRTYPE)
  link = header("link", kind=tarfile.SYMTYPE)
  file = header("x", 1) + b"1" + bytes(511)
  assert read(folder + link + file + END) == {"x": b"1"}


def test_tar_read_obeys_name_and_size_of_a_pax_header():
  member = pax(path="other", size=2) + header("x", 1) + b"12" + bytes(510)
  assert read(member + END) == {"other": b"12"}


DAMAGED = {
  "a negative size": header(stored_size=b"\xff" * 12),
  "an absurd size": header(stored_size=b"\x80" + b"\x7f" * 11),
  "a size that is no number": header(stored_size=b"0000000000x\0"),
  "a member of 10 GB": header(size=10 << 30) + b"1",
  "a negative pax size": pax(size=-512) + header() + END,
  "a pax size of 5,000 digits": extension(
    tarfile.XHDTYPE, b"5009 size=" + b"9" * 4_998 + b"\n"
  )
  + header()
  + END,
  "a broken pax record": extension(tarfile.XHDTYPE, b"99 path=x\n"),
  "an empty pax record": extension(tarfile.XHDTYPE, b"0 path=x\n"),
  "no pax record": extension(tarfile.XHDTYPE, b"path=x\n"),
  "a pax header of 10 GB": header(size=10 << 30, kind=tarfile.XHDTYPE),
  "a long name of 10 GB": header(size=10 << 30, kind=tarfile.GNUTYPE_LONGNAME),
  "a long name of nothing": extension(tarfile.GNUTYPE_LONGNAME, b"x") + END,
  "5,000 long names": extension(tarfile.GNUTYPE_LONGNAME, b"x") * 5_000
  + header()
  + END,
  "5,000 pax headers": pax(path="x") * 5_000 + header() + END,
  "an end mark of one block": header() + bytes(512),
  "a header behind one block": header() + bytes(512) + header("y") + END,
  "no end mark": header(),
  "data behind the end mark": header() + END + b"x",
}


def test_members_take_no_memory_once_they_are_read():
  """tarfile would keep every member, with its name and pax headers."""
  member = extension(tarfile.GNUTYPE_LONGNAME, b"x" * 10_000) + header()
  file = io.BytesIO(member * 1_000 + END)
  tracemalloc.start()
  try:
    members = tar.read_members(file, max_bytes=1 << 30, wanted=lambda _: False)
    assert not list(members)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 5 << 20


@pytest.mark.parametrize("case", sorted(DAMAGED))
def test_tar_read_refuses_damage_in_little_memory(case):
  tracemalloc.start()
  try:
    with pytest.raises((*streams.DAMAGE, streams.TooLargeError)) as caught:
      read(DAMAGED[case])
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 20 << 20
  if caught.type is tarfile.ReadError:
    assert "byte " in str(caught.value)


def test_tar_read_names_the_place_of_damage():
  with pytest.raises(tarfile.ReadError, match="header.*after 'x', byte"):
    read(header("x") + b"x" * 512 + END)
  with pytest.raises(
    tarfile.ReadError, match="ends before its end mark in the middle of 'x'"
  ):
    read(header("x", 1_000) + bytes(512))


def test_tar_read_allows_any_padding_but_a_header_in_the_last_record():
  """Old writers left in it what was in their buffer; POSIX allows it."""
  sound = header("x") + END
  padding = b"left over".ljust(tar.RECORD - len(sound), b"\1")
  assert read(gzip.compress(sound + padding)) == {"x": b""}
  for wrong in (header("y") + END, padding + b"\1"):
    with pytest.raises(tarfile.ReadError, match="end mark after 'x'"):
      read(gzip.compress(sound + wrong))
  with pytest.raises(tarfile.ReadError, match="end mark after 'x'"):
    read(sound + padding)


def test_tar_read_limit_counts_every_byte():
  sound = packed()
  size = len(sound)
  for content in (sound, gzip.compress(sound), lzma.compress(sound)):
    assert read(content, size) == FILES | {"empty": b""}
    with pytest.raises(streams.TooLargeError):
      read(content, size - 1)
