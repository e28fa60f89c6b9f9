"""Reads archives as their authors ship them, without unpacking to disk.

An archive is a tar (plain, gzip, bzip2 or xz, recognised by its content), a
folder, or a single file. Nothing is written to disk. Members whose paths lead
out of the archive are refused nevertheless, because such an archive is
malicious.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import posixpath
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import tqdm

from jaxformers.data.engine import files, streams, tar
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.paths import expand

COMPRESSED = (".gz", ".bz2", ".xz")
# First bytes and names of the formats that are refused.
NOT_READ = {
  b"PK\x03\x04": "zip",
  b"PK\x05\x06": "zip",
  b"7z\xbc\xaf": "7z",
  b"Rar!": "rar",
  b"\x28\xb5\x2f\xfd": "zstd",
}
Place = TypeVar("Place")
Stream = tuple[str, Iterator[bytes]]  # A name, and the content in parts.


def find(names: Iterable[str], archive: str, data_dir: Path) -> Path | None:
  """Returns the path of a local archive, or None if there is none.

  Without `archive`, searches for the names in $JAXFORMERS_DATA_ARCHIVES and
  then in `data_dir`/downloads/manual.

  Args:
    names: names of files or folders, in order of preference.
    archive: path that the user chose; "" to search for the names.
    data_dir: folder of prepared data.

  Raises:
    UserError: if the user chose a path or a folder that does not exist.
  """
  names = tuple(names)
  if archive:
    path = expand(archive)
    if not path.exists():
      raise UserError(
        f"There is no archive {path}: give the path of {' or '.join(names)}, "
        "or remove the option to search for the archive and to download it."
      )
    return path
  # Search the user's folder first, then the folder of downloads.
  folders = [data_dir / "downloads" / "manual"]
  if names and (chosen := os.environ.get("JAXFORMERS_DATA_ARCHIVES")):
    if not expand(chosen).is_dir():
      raise UserError(
        f"JAXFORMERS_DATA_ARCHIVES={chosen!r} is no folder: correct or unset "
        "it."
      )
    folders.insert(0, expand(chosen))
  paths = [folder / name for folder in folders for name in names]
  return next((path for path in paths if path.exists()), None)


def checksum(path: Path) -> str:
  """Returns the SHA-256 of a file, or "listing-" and a SHA-256 for a folder.

  The SHA-256 of a folder covers the names and sizes of its files, not their
  content: every run that names the folder computes it at its start, and a
  folder may hold many gigabytes. Files that systems add to a folder do not
  count; see `files.is_junk`.
  """
  if path.is_file():
    status = path.stat()
    return _file_checksum(path, status.st_size, status.st_mtime_ns)
  # Hash "NAME\0SIZE\n" of every file of the folder.
  digest = hashlib.sha256()
  for name, entry in files.walk(path):
    if entry.is_file():
      size = entry.stat().st_size
      digest.update(os.fsencode(name) + f"\0{size}\n".encode())
  return f"listing-{digest.hexdigest()}"


@functools.cache
def _file_checksum(path: Path, size: int, modified: int) -> str:
  """Returns the SHA-256 of a file; reads the file once per process.

  The preparation of data needs the SHA-256 before and after it. Size and time
  of change are arguments so that a file that has changed is read again.
  """
  del size, modified
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def members(
  path: Path,
  *,
  max_bytes: int,
  wanted: Callable[[str], bool] = lambda name: True,
  is_users: bool = False,
) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) of every wanted file, in the archive's order.

  Trust no content before the iterator has ended: the checksum of an archive is
  compared at its end.

  Args:
    path: path of a tar, a folder, or a single file, which may be compressed.
    max_bytes: largest allowed size of all unpacked content.
    wanted: function that returns True for the name of a file to read. Files
      that systems add to a folder are never read; see `files.is_junk`.
    is_users: True for a folder that the user has made: its links may lead out
      of the folder.

  Raises:
    UserError: for an archive that is damaged, truncated, of an unknown format
      or larger than max_bytes, that holds two files with the same name, or a
      member or a link that leads out of the archive.
  """
  with _explained(path):
    for name, parts in _streams(path, max_bytes, wanted, is_users):
      content = io.BytesIO()
      content.writelines(parts)
      yield name, content.getvalue()


def lines(
  path: Path, wanted: Callable[[str], bool], *, max_bytes: int
) -> Iterator[tuple[str, bytes]]:
  """Yields (name, line) of every wanted file; never holds a whole file.

  Only \\n ends a line; the line is yielded without it.

  Args:
    path, wanted, max_bytes: arguments of `members`.

  Raises:
    UserError: for the same reasons as `members`.
  """
  with _explained(path):
    for name, parts in _streams(path, max_bytes, wanted):
      rest = b""
      for part in parts:
        # Keep the incomplete last line for the next part.
        *complete, rest = (rest + part).split(b"\n")
        yield from ((name, line) for line in complete)
      if rest:
        yield name, rest


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
  """Replaces the errors of a damaged archive by a UserError."""
  try:
    yield
  except streams.TooLargeError:
    raise _too_large(path) from None
  except streams.DAMAGE as error:
    # Files of a folder have no format: keep the error of the file system.
    if path.is_dir():
      raise
    raise UserError(
      f"{path} cannot be read to its end ({error}): it is damaged, truncated "
      "or no archive of a known format. Download it again; no part of it "
      "was kept."
    ) from error


def _streams(
  path: Path,
  max_bytes: int,
  wanted: Callable[[str], bool],
  is_users: bool = False,
) -> Iterator[Stream]:
  """Yields (name, parts) of every wanted file, in the archive's order."""
  if path.is_dir():
    yield from _folder(path, max_bytes, wanted, is_users)
    return
  # Refuse two files with the same name: it is unclear which one is meant.
  names: set[str] = set()
  for name, parts in _file_members(path, max_bytes, wanted):
    # "a/./b" and "a/b" are the same name.
    plain_name = posixpath.normpath(name)
    if plain_name in names:
      problem = f"holds two files with the name {plain_name!r}"
      raise _refused(path, problem, "Pack it again with one of the two.")
    names.add(plain_name)
    yield name, parts


def placed_members(
  path: Path, place: Callable[[str], Place | None], *, max_bytes: int
) -> Iterator[tuple[Place, str, bytes]]:
  """Yields (place, name, content) of every file that has a place.

  Args:
    path: path of a tar, a folder, or a single file.
    place: function from the name of a file to a description of its content,
      such as its split; returns None for files that are not read.
    max_bytes: largest allowed size of all unpacked content.

  Raises:
    UserError: for the same reasons as `members`.
  """

  def has_place(name: str) -> bool:
    return place(name) is not None

  for name, content in members(path, max_bytes=max_bytes, wanted=has_place):
    file_place = place(name)
    assert file_place is not None  # `members` yields only files with a place.
    yield file_place, name, content


def by_file(places: Mapping[str, Place]) -> Callable[[str], Place | None]:
  """Returns the `place` function that looks up the last part of a path."""
  return lambda path: places.get(path.rpartition("/")[2])


def _file_members(
  path: Path, max_bytes: int, wanted: Callable[[str], bool]
) -> Iterator[Stream]:
  """Yields (name, parts) of the wanted files of a tar, or of a single file."""
  with path.open("rb") as raw:
    # Recognise the format by the content: the file may have any name.
    start = raw.read(tar.BLOCK)
    raw.seek(0)
    for magic, kind in NOT_READ.items():
      if start.startswith(magic):
        raise UserError(
          f"{path} is a {kind} archive, which cannot be read here: unpack it, "
          "and give the folder, or pack it as a tar."
        )
    # Tell a compressed single file, such as train.txt.gz, from a tar.
    is_tar, name = tar.is_tar(start), path.name
    is_one = streams.is_compressed(start) and ".tar" not in path.suffixes
    if is_one and path.suffix.lower() in COMPRESSED:
      name = path.stem
    if is_one:
      is_tar = tar.is_compressed_tar(raw)
      raw.seek(0)
    # Yield a single file, if it is wanted.
    if not is_tar:
      if path.stat().st_size > max_bytes:
        raise _too_large(path)
      if not wanted(name):
        kind = f"a compressed {name!r}, and neither" if is_one else "neither"
        problem = f"{path.name} is {kind} a tar nor one of its files"
        raise tarfile.ReadError(problem)
      yield name, streams.read_file(raw, max_bytes)
      return
    # Read the tar as a stream. The progress bar counts the bytes of the file;
    # tqdm hides the bar if stderr is not a terminal.
    bar = {"desc": path.name, "file": sys.stderr, "disable": None}
    with tqdm.tqdm.wrapattr(
      raw, "read", total=path.stat().st_size, **bar
    ) as stream:
      yield from tar.read_members(
        stream,
        max_bytes=max_bytes,
        wanted=lambda member: _is_wanted(path, member, wanted),
      )


def _refused(
  path: Path, problem: str, remedy: str = "Download it again from its authors."
) -> UserError:
  """Returns the error for an archive that is refused."""
  return UserError(
    f"{path} {problem}: it was refused, nothing was kept of it. {remedy}"
  )


def _too_large(path: Path) -> UserError:
  """Returns the error for an archive that unpacks to too many bytes."""
  return _refused(path, "unpacks to more bytes than its data set has")


def _is_wanted(
  path: Path, member: tarfile.TarInfo, wanted: Callable[[str], bool]
) -> bool:
  """Returns True if a member is a wanted file.

  Raises:
    UserError: for a member that leads out of the archive or is no plain file,
      and for a wanted member that is only a link.
  """
  name = member.name
  # Refuse names, and targets of links, that lead out of the archive.
  target = name
  if member.issym():
    target = posixpath.join(posixpath.dirname(name), member.linkname)
  elif member.islnk():
    target = member.linkname
  for place in (name, target):
    inside = posixpath.normpath(place.replace("\\", "/"))
    if inside.startswith(("/", "../")) or inside == ".." or ":" in inside[:2]:
      problem = f"holds {name!r}, which leads out of it ({place!r})"
      raise _refused(path, problem)
  # Refuse devices, and sparse files: their holes can claim any size.
  is_device = member.ischr() or member.isblk() or member.isfifo()
  if is_device or member.type == tarfile.GNUTYPE_SPARSE:
    raise _refused(path, f"holds {name!r}, which is not a plain file")
  # Refuse a wanted file that is only a link.
  is_link = member.issym() or member.islnk()
  if is_link and not files.is_junk(name) and wanted(name):
    raise UserError(
      f"{path} holds {name!r} only as a link to {member.linkname!r}: give the "
      "unpacked folder, or pack it again with files instead of links (GNU tar: "
      "--hard-dereference --dereference)."
    )
  return member.isfile() and not files.is_junk(name) and wanted(name)


def refusal(archive: Path, name: str, problem: str) -> UserError:
  """Returns the error for a file of an archive that cannot be used.

  Args:
    archive: path of the archive.
    name: name of the file in it.
    problem: description of the file that completes "which is ...".
  """
  return UserError(
    f"{archive} holds {name!r}, which is {problem}. Download it again; no "
    "part of it was kept."
  )


def _folder(
  folder: Path, max_bytes: int, wanted: Callable[[str], bool], is_users: bool
) -> Iterator[Stream]:
  """Yields (name, parts) of the wanted files of an unpacked archive."""
  left, root = max_bytes, folder.resolve()
  for name, entry in tqdm.tqdm(
    files.walk(folder), folder.name, unit="file", file=sys.stderr, disable=None
  ):
    if not wanted(name):
      continue
    file = Path(entry.path)
    if not entry.is_file():
      raise UserError(
        f"{file} is no file, or a link to a missing one: remove or replace it."
      )
    # Refuse links out of the folder, and more bytes than allowed.
    if not is_users and not file.resolve().is_relative_to(root):
      raise UserError(
        f"{folder} holds {name!r}, a link that leads out of the folder: "
        "replace the link by the file."
      )
    left -= entry.stat().st_size
    if left < 0:
      raise _too_large(folder)
    with file.open("rb") as raw:
      yield name, iter(functools.partial(raw.read, streams.BUFFER), b"")
