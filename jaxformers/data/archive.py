"""Archives as their authors ship them, read without unpacking to disk.

An archive is a tar (plain, gzip, bzip2 or xz, told by its content), a folder,
or a single file. Nothing of it is ever written, so nothing can be left behind;
members that would not stay inside a folder are refused all the same, for such
an archive was made to harm.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import io
import lzma
import os
import posixpath
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tqdm

OPENERS = {
  b"\x1f\x8b": gzip.open,
  b"BZh": bz2.open,
  b"\xfd7zXZ\x00": lzma.open,
}


def find(names: Iterable[str], archive: str, data_dir: Path) -> Path | None:
  """The local archive: the given one, or where archives are looked for.

  Looks for the names in $JAXFORMERS_DATA_ARCHIVES and then in
  `data_dir`/downloads/manual.

  Args:
    names: of files or folders, in order of preference.
    archive: what the user gave; "" to look.
    data_dir: where prepared data stands.

  Raises:
    ValueError: if one is given and is not there.
  """
  names = tuple(names)
  if archive:
    path = Path(archive).expanduser()
    if not path.exists():
      raise ValueError(
        f"There is no archive {path}: give the path of {' or '.join(names)}, "
        "or leave the archive out to look for it and to download it."
      )
    return path
  folders = [data_dir / "downloads" / "manual"]
  if os.environ.get("JAXFORMERS_DATA_ARCHIVES"):
    folders.insert(0, Path(os.environ["JAXFORMERS_DATA_ARCHIVES"]))
  paths = [folder / name for folder in folders for name in names]
  return next((path for path in paths if path.exists()), None)


def checksum(path: Path) -> str:
  """SHA-256 of a file; of a folder, "listing-" and that of names and sizes.

  A release may be a folder of many gigabytes, and this is asked for at the
  start of every run that names it.
  """
  if path.is_file():
    status = path.stat()
    return _file_checksum(path, status.st_size, status.st_mtime_ns)
  digest = hashlib.sha256()
  for file in _files(path):
    name = file.relative_to(path).as_posix()
    digest.update(f"{name}\0{file.stat().st_size}\n".encode())
  return f"listing-{digest.hexdigest()}"


@functools.cache
def _file_checksum(path: Path, size: int, modified: int) -> str:
  """Once a process: preparing asks for it before and after."""
  del size, modified  # They tell whether it is still the same file.
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def members(
  path: Path,
  *,
  max_bytes: int,
  wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) of every wanted file of an archive, in its order.

  Args:
    path: a tar, a folder, or a single file.
    max_bytes: what the whole archive may hold, unpacked; more is a bomb.
    wanted: by name; the others are passed over.

  Raises:
    ValueError: for an archive that is cut short, is none, holds a member or a
      link that leads out of it, or holds more than max_bytes.
  """
  if path.is_dir():
    yield from _folder(path, max_bytes, wanted)
    return
  try:
    with path.open("rb") as raw:
      start = raw.read(300)
      raw.seek(0)
      opener = next(
        (o for magic, o in OPENERS.items() if start.startswith(magic)), None
      )
      if opener is None and start[257:262] != b"ustar":
        yield from _single(path, raw, max_bytes, wanted)
        return
      with (
        tqdm.tqdm(
          total=path.stat().st_size,
          desc=path.name,
          unit="B",
          unit_scale=True,
          file=sys.stderr,
          disable=None,  # Where nobody watches.
        ) as bar,
        opener(raw) if opener else raw as plain,
        tarfile.open(
          fileobj=_Limited(path, plain, max_bytes), mode="r|"
        ) as tar,
      ):
        for member in tar:
          bar.update(raw.tell() - bar.n)
          if _is_wanted(path, member) and wanted(member.name):
            yield member.name, tar.extractfile(member).read()
  except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as e:
    raise ValueError(
      f"{path} cannot be read to its end ({e}): it is truncated or no archive "
      "of a kind that is known. Fetch it again; nothing was kept of it."
    ) from e


class _Limited(io.RawIOBase):
  """A stream that refuses to give more than a number of bytes.

  tarfile trusts the sizes that headers name; everything it reads, skips or
  takes for a header passes through here.
  """

  def __init__(self, path: Path, stream: Any, max_bytes: int) -> None:
    self.path, self.stream, self.left = path, stream, max_bytes

  def read(self, size: int = -1) -> bytes:
    """At most `size` bytes; ValueError once the limit is passed."""
    content = self.stream.read(min(size, self.left + 1) if size >= 0 else -1)
    self.left -= len(content)
    if self.left < 0:
      raise _bomb(self.path)
    return content


def _bomb(path: Path) -> ValueError:
  return ValueError(
    f"{path} unpacks to more than the data set it should be: it was refused, "
    "nothing was kept of it. Fetch it again from its authors."
  )


def _is_wanted(path: Path, member: tarfile.TarInfo) -> bool:
  """Whether a member is a file; ValueError for one that would do harm."""
  name = member.name
  target = name
  if member.issym():
    target = posixpath.join(posixpath.dirname(name), member.linkname)
  elif member.islnk():
    target = member.linkname
  for place in (name, target):
    inside = posixpath.normpath(place.replace("\\", "/"))
    if inside.startswith(("/", "../")) or inside == ".." or ":" in inside[:2]:
      raise ValueError(
        f"{path} holds {name!r}, which leads out of it ({place!r}): it was "
        "refused, nothing was kept of it. Fetch it again from its authors."
      )
  odd = member.ischr() or member.isblk() or member.isfifo()
  if odd or member.issparse():  # Holes would come out of nothing.
    raise ValueError(
      f"{path} holds {name!r}, which is no plain file: it was refused, nothing "
      "was kept of it. Fetch it again from its authors."
    )
  return member.isfile()


def _single(
  path: Path, raw: Any, max_bytes: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
  if path.stat().st_size > max_bytes:
    raise _bomb(path)
  if not wanted(path.name):
    raise tarfile.ReadError(
      f"{path.name} is neither a tar nor one of its files"
    )
  yield path.name, raw.read()


def _files(folder: Path) -> list[Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def _folder(
  folder: Path, max_bytes: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
  left, root = max_bytes, folder.resolve()
  for file in tqdm.tqdm(
    _files(folder), folder.name, unit="file", file=sys.stderr, disable=None
  ):
    name = file.relative_to(folder).as_posix()
    if not wanted(name):
      continue
    if not file.resolve().is_relative_to(root):
      raise ValueError(
        f"{folder} holds {name!r}, a link that leads out of it: it was "
        "refused. Put the file itself there."
      )
    left -= file.stat().st_size
    if left < 0:
      raise _bomb(folder)
    yield name, file.read_bytes()
