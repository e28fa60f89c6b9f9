import gzip
import itertools
import os
import re
import tarfile
import tracemalloc

import numpy as np
import pytest

from jaxformers.data.engine import archive, streams
from tests.data.archives import write_folder, write_tar

FILES = {"a/one.txt": b"1" * 5_000, "a/b/two.txt": b"2"}


def read(path, max_bytes=1 << 20, **options):
  return dict(archive.members(path, max_bytes=max_bytes, **options))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_read_detects_compression_by_content(tmp_path, mode):
  path = write_tar(tmp_path / "release.gz", FILES, mode=mode)
  assert read(path) == FILES
  only = read(path, wanted=lambda name: name.endswith("two.txt"))
  assert only == {"a/b/two.txt": b"2"}


def test_read_of_a_folder_is_that_of_an_archive(tmp_path):
  assert read(write_folder(tmp_path / "x", FILES)) == FILES


def test_read_of_a_single_file_is_its_own_member(tmp_path):
  (tmp_path / "test.csv").write_bytes(b"1,2")
  assert read(tmp_path / "test.csv") == {"test.csv": b"1,2"}
  with pytest.raises(ValueError, match=r"test\.csv.*\btar\b"):
    read(tmp_path / "test.csv", wanted=lambda name: False)


@pytest.mark.parametrize("pack", [write_tar, write_folder])
def test_lines_are_read_in_constant_memory(tmp_path, pack, monkeypatch):
  monkeypatch.setattr(streams, "BUFFER", 1 << 16)
  line = b"x" * 1_000
  content = (line + b"\n") * 20_000 + b"end\r"
  path = pack(tmp_path / "texts", {"a.tsv": content, "b.txt": content})
  lines = archive.lines(path, lambda n: n == "a.tsv", max_bytes=1 << 26)
  tracemalloc.start()
  try:
    found = sum(1 for found in lines if found == ("a.tsv", line))
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert found == 20_000
  assert peak < len(content) / 10
  *_, last = archive.lines(path, lambda n: n == "a.tsv", max_bytes=1 << 26)
  assert last == ("a.tsv", b"end\r")


HOSTILE = {
  "parent": ({"../evil.txt": b"x"}, ()),
  "absolute": ({"/etc/evil": b"x"}, ()),
  "hidden parent": ({"a/../../evil": b"x"}, ()),
  "backslashes": ({"..\\evil": b"x"}, ()),
  "drive": ({"c:/evil": b"x"}, ()),
  "symbolic link": ({}, [("a/link", "../../etc/passwd", tarfile.SYMTYPE)]),
  "absolute link": ({}, [("link", "/etc/passwd", tarfile.SYMTYPE)]),
  "hard link": ({}, [("a/link", "../etc/passwd", tarfile.LNKTYPE)]),
  "device": ({}, [("null", "", tarfile.CHRTYPE)]),
  "pipe": ({}, [("pipe", "", tarfile.FIFOTYPE)]),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_read_refuses_members_outside_the_archive(tmp_path, case):
  files, links = HOSTILE[case]
  path = write_tar(tmp_path / "a.tar.gz", {**FILES, **files}, links)
  name = [*files, *(link for link, *_ in links)][0]
  with pytest.raises(ValueError, match=re.escape(repr(name))):
    read(path)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz"]


@pytest.mark.skipif(
  not hasattr(tarfile, "data_filter"), reason="Python before 3.11.4"
)
def test_all_that_the_filter_of_tarfile_refuses_is_refused(tmp_path):
  """Members are made of hostile names, targets and types in all combinations.

  The filter strips the first slash of a name; here such a name is refused.
  """
  names = ("a", "a/b", "../a", "a/../../b", "a/..", "..", "/a", "a/../b", "./a")
  targets = ("", ".", "..", "../a", "../../a", "/a", "a/../../../b", "./../..")
  kinds = (
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
  )
  num_refused = 0
  for name, target, kind in itertools.product(names, targets, kinds):
    member = tarfile.TarInfo(name)
    member.linkname, member.type = target, kind
    try:
      tarfile.data_filter(member, str(tmp_path))
    except tarfile.FilterError:
      num_refused += 1
      path = write_tar(tmp_path / "a.tar", {}, [(name, target, kind)], "w")
      with pytest.raises(ValueError, match="was refused, nothing was kept"):
        read(path)
  assert num_refused > 250


SPARSE = {
  "0.0": {"size": 1 << 28, "numblocks": 1, "offset": 0, "numbytes": 0},
  "0.1": {"size": 1 << 28, "numblocks": 1, "map": "0,0"},
  "1.0": {"realsize": 1 << 28, "major": 1, "minor": 0, "name": "zeros"},
}


@pytest.mark.parametrize("version", [*sorted(SPARSE), "before pax"])
def test_read_refuses_sparse_members(tmp_path, version):
  """A sparse member of 256 MiB in an archive of 2 KiB."""
  member = tarfile.TarInfo("zeros")
  fields = SPARSE.get(version, {})
  member.pax_headers = {f"GNU.sparse.{k}": str(v) for k, v in fields.items()}
  if not fields:
    member.type = tarfile.GNUTYPE_SPARSE
  with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
    tar.addfile(member)
  message = "'zeros', which is not a plain file: it was refused"
  with pytest.raises(ValueError, match=message):
    read(tmp_path / "a.tar")


@pytest.mark.parametrize(
  ("kind", "target"),
  [(tarfile.SYMTYPE, "../one.txt"), (tarfile.LNKTYPE, "a/one.txt")],
)
def test_read_skips_links_unless_wanted(tmp_path, kind, target):
  links = [("a/b/link", target, kind)]
  path = write_tar(tmp_path / "a.tar.gz", FILES, links)
  assert read(path, wanted=lambda name: name != "a/b/link") == FILES
  with pytest.raises(ValueError, match="'a/b/link'.*link"):
    read(path)


def test_read_refuses_a_link_out_of_a_folder(tmp_path):
  folder = write_folder(tmp_path / "x", FILES)
  (tmp_path / "secret.txt").write_text("secret")
  os.symlink(tmp_path / "secret.txt", folder / "a" / "link.txt")
  with pytest.raises(ValueError, match=r"'a/link\.txt'.*link"):
    read(folder)


def test_read_refuses_bombs_before_unpacking(tmp_path):
  path = write_tar(tmp_path / "a.tar.gz", {"zeros": bytes(1 << 24)})
  assert path.stat().st_size < 1 << 17
  with pytest.raises(ValueError, match=r"a\.tar\.gz unpacks"):
    read(path, max_bytes=1 << 20)
  # Also where the zeros stand in what nobody wants, or in a header.
  with pytest.raises(ValueError, match=r"a\.tar\.gz unpacks"):
    read(path, max_bytes=1 << 20, wanted=lambda name: False)
  header = tarfile.TarInfo("pax")
  header.type, header.size = tarfile.XHDTYPE, 1 << 24
  with gzip.open(tmp_path / "b.tar.gz", "wb") as file:
    file.write(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 24))
  with pytest.raises(ValueError, match="header.*16,777,216"):
    read(tmp_path / "b.tar.gz", max_bytes=1 << 20)
  # Also where they stand behind the end mark.
  with gzip.open(path, "ab") as file:
    file.write(bytes(1 << 24))
  with pytest.raises(ValueError, match=r"a\.tar\.gz unpacks"):
    read(path, max_bytes=(1 << 24) + (1 << 20))
  folder = write_folder(tmp_path / "x", {"zeros": bytes(1 << 21)})
  with pytest.raises(ValueError, match="x unpacks"):
    read(folder, max_bytes=1 << 20)
  with pytest.raises(ValueError, match="x/zeros unpacks"):
    read(folder / "zeros", max_bytes=1 << 20)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_read_refuses_a_truncated_archive(tmp_path, mode):
  content = {"a": os.urandom(50_000), "b": os.urandom(50_000)}
  path = write_tar(tmp_path / "a.tar", content, mode=mode)
  complete = path.read_bytes()
  path.write_bytes(complete[: len(complete) * 2 // 3])
  with pytest.raises(ValueError, match=r"a\.tar .*truncated"):
    read(path)


def many_files(seed=0):
  """Thirty files of text, some of several blocks."""
  rng = np.random.default_rng(seed)
  words = [b"alpha", b"beta", b"gamma", b"delta", b"epsilon"]
  return {
    f"set/train/{i:02d}.txt": b" ".join(rng.choice(words, 10 + 20 * (i % 9)))
    for i in range(30)
  }


def outcomes(path, changes):
  """Contents that damaged copies of a file are read as; None if refused.

  changes: the damaged copies, bytes.
  """
  results = []
  for damaged in changes:
    path.write_bytes(damaged)
    try:
      results.append(read(path, wanted=lambda name: name.endswith(".txt")))
    except ValueError as error:
      assert str(path) in str(error)
      results.append(None)
  return results


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_read_detects_flipped_bits_or_gives_the_same_files(tmp_path, mode):
  files = many_files()
  path = write_tar(tmp_path / "a.tar", files, mode=mode)
  sound = path.read_bytes()

  def flipped(bit):
    damaged = bytearray(sound)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)

  bits = np.random.default_rng(1).integers(0, 8 * len(sound), 150)
  header = range(4 * 8, 10 * 8) if mode == "w:gz" else ()
  results = outcomes(path, [flipped(int(bit)) for bit in bits])
  assert all(result in (None, files) for result in results)
  assert results.count(None) >= 140
  # Time, level and system of a gzip's header say nothing of its content.
  assert outcomes(path, map(flipped, header)) == [files] * len(header)


def test_read_refuses_a_damaged_tar_header(tmp_path):
  """A plain tar has no checksum but that of every header."""
  files = many_files()
  path = write_tar(tmp_path / "a.tar", files, mode="w")
  sound = path.read_bytes()
  starts = [
    sound.index(name.encode()) for name in list(files)[:: len(files) // 6]
  ]
  rng = np.random.default_rng(2)

  def changed(start, content):
    return sound[:start] + content + sound[start + len(content) :]

  changes = [
    changed(start + k, bytes([sound[start + k] ^ 1 << int(rng.integers(8))]))
    for start in starts
    for k in (0, 9, 100, 124, 130, 150, 156, 257, 300)
  ]
  changes += [changed(start, bytes(512)) for start in starts]  # Lost blocks.
  changes += [changed(start, bytes(4_096)) for start in starts]
  assert outcomes(path, changes) == [None] * len(changes)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_read_refuses_every_cut_but_of_padding(tmp_path, mode):
  files = many_files()
  path = write_tar(tmp_path / "a.tar", files, mode=mode)
  sound = path.read_bytes()
  # Behind the last member stand two blocks of zeros, and padding.
  end = len(sound.rstrip(b"\0")) if mode == "w" else len(sound)
  padding = end + -end % 512 + 1_024 if mode == "w" else len(sound)
  cuts = np.random.default_rng(3).integers(0, len(sound), 200).tolist()
  cuts += [padding - 1, padding - 512, padding - 513, padding - 1_024]
  results = outcomes(path, [sound[:cut] for cut in cuts])
  for cut, result in zip(cuts, results, strict=True):
    assert result == (files if cut >= padding else None), (cut, padding)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_read_allows_only_zeros_after_an_archive(tmp_path, mode):
  path = write_tar(tmp_path / "a.tar", FILES, mode=mode)
  sound = path.read_bytes()
  assert outcomes(path, [sound, sound + bytes(4_096)]) == [FILES, FILES]
  other = write_tar(tmp_path / "b.tar", {"c": b"3"}, mode=mode).read_bytes()
  following = [b"garbage", sound[:20], sound, other, bytes(700) + b"x", other]
  results = outcomes(path, [sound + more for more in following])
  assert results == [None] * len(following)


def test_read_refuses_two_files_of_a_name(tmp_path):
  path = tmp_path / "a.tar"
  write_tar(path, FILES, mode="w")
  with tarfile.open(path, "a") as file:
    file.addfile(tarfile.TarInfo("./a/one.txt"))
  with pytest.raises(ValueError, match="two files.*'a/one.txt'"):
    read(path)


@pytest.mark.parametrize(
  "content", [b"", b"none", b"\x1f\x8b\x08junk", b"BZhx"]
)
def test_read_refuses_files_that_are_no_archives(tmp_path, content):
  (tmp_path / "a.tar.gz").write_bytes(content)
  with pytest.raises(ValueError, match=r"a\.tar\.gz .*no archive"):
    read(tmp_path / "a.tar.gz", wanted=lambda name: name.endswith(".txt"))


def test_find_looks_in_the_folder_and_names_the_archives(tmp_path, monkeypatch):
  monkeypatch.delenv("JAXFORMERS_DATA_ARCHIVES", raising=False)
  names = ("one.tar.gz", "two")
  assert archive.find(names, "", tmp_path) is None
  manual = tmp_path / "downloads" / "manual"
  (manual / "two").mkdir(parents=True)
  assert archive.find(names, "", tmp_path) == manual / "two"
  (tmp_path / "one.tar.gz").touch()
  monkeypatch.setenv("JAXFORMERS_DATA_ARCHIVES", str(tmp_path))
  assert archive.find(names, "", tmp_path) == tmp_path / "one.tar.gz"
  assert archive.find(names, str(manual), tmp_path) == manual
  with pytest.raises(ValueError, match="nowhere.tar.gz.*one.tar.gz or two"):
    archive.find(names, "nowhere.tar.gz", tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path.parent))
  monkeypatch.setenv("JAXFORMERS_DATA_ARCHIVES", f"~/{tmp_path.name}")
  assert archive.find(names, "", tmp_path) == tmp_path / "one.tar.gz"
  monkeypatch.setenv("JAXFORMERS_DATA_ARCHIVES", "/nowhere")
  with pytest.raises(ValueError, match="ARCHIVES='/nowhere' is no folder"):
    archive.find(names, "", tmp_path)
  assert archive.find((), "", tmp_path) is None  # Of generated data.


def test_checksum_changes_with_names_and_contents(tmp_path):
  folder = write_folder(tmp_path / "x", FILES)
  before = archive.checksum(folder)
  (folder / "a" / "b" / "three.txt").touch()
  assert archive.checksum(folder) != before
  path = write_tar(tmp_path / "a.tar.gz", FILES)
  first = archive.checksum(path)
  path.write_bytes(path.read_bytes() + b"\0")
  assert archive.checksum(path) != first
