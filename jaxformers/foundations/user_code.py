"""Imports of users' modules, which register mixers, blocks or tasks.

A module that a command, a config file or a call names is always imported. A
module that only the files of a folder name, such as the workdir of another
person's run, is imported only inside `trusting`. Such a module is never
imported from that folder itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from jaxformers.foundations.errors import UserError

_is_trusted = contextvars.ContextVar("is_trusted", default=False)


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
  """Allows imports of the modules that folders name, inside the block.

  Args:
    trust: True allows the imports. False changes nothing.
  """
  token = _is_trusted.set(trust or _is_trusted.get())
  try:
    yield
  finally:
    _is_trusted.reset(token)


def import_modules(listed: Any) -> None:
  """Imports modules that the user has named.

  Every command finds modules in the working directory. These modules can also
  import other modules of the directory later.

  Args:
    listed: value of `config.imports`: names of modules, separated by commas.

  Raises:
    UserError: if a module cannot be found.
  """
  for name in _names(listed):
    with _search_path([str(Path.cwd()), *sys.path]):
      _import(name)
  # Add the working directory for later imports.
  if listed and not {"", str(Path.cwd())} & {*sys.path}:
    sys.path.append(str(Path.cwd()))


def import_named_by(folder: Path, listed: Any) -> None:
  """Imports modules that the files of a folder name.

  Modules that are already imported need no trust. A module is never imported
  from the folder itself, and neither are the modules that it imports.

  Args:
    folder: folder of a trained model.
    listed: value of `config.imports` in the files of the folder.

  Raises:
    UserError: if the call is outside `trusting`, if a module lies in the
      folder, or if a module cannot be found.
  """
  # Refuse names of modules that are not imported yet, without trust.
  names = [name for name in _names(listed) if name not in sys.modules]
  if names and not _is_trusted.get():
    raise UserError(
      f"{folder} needs the code of {', '.join(map(repr, names))}, which runs "
      "with your rights. If you trust this code and the author of the folder, "
      "give --trust (in Python trust=True), or import the code first."
    )
  # Import from all places outside the folder.
  places = [str(Path.cwd()), *sys.path]
  others = [place for place in places if not _is_inside(place, folder)]
  for name in names:
    if _lies_in(folder, name, places):
      raise UserError(
        f"The module {name!r}, which {folder} names, lies in that folder and "
        "is never imported from it: move the module out of the folder if you "
        "trust its code."
      )
    with _search_path(others):
      _import(name)


def _names(listed: Any) -> list[str]:
  # Split the names, and check that all parts are identifiers.
  names = listed.split(",") if isinstance(listed, str) else [""]
  names = [name.strip() for name in names]
  parts = ".".join(names).split(".")
  if listed != "" and not all(part.isidentifier() for part in parts):
    raise UserError(
      f"config.imports={listed!r}: give names of modules, separated by commas."
    )
  return [name for name in names if name]


@contextlib.contextmanager
def _search_path(places: list[str]) -> Iterator[None]:
  """Replaces `sys.path` by the given places, inside the block."""
  before = sys.path[:]
  sys.path[:] = places
  try:
    yield
  finally:
    sys.path[:] = before


def _import(name: str) -> None:
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as error:
    # The user's module was found, but needs a library that is not installed.
    if error.name not in (name, name.partition(".")[0]):
      raise
    raise UserError(
      f"config.imports={name!r} cannot be imported from {Path.cwd()}: run in "
      f"the folder of {name}.py, or put that folder on PYTHONPATH."
    ) from None


def _lies_in(folder: Path, name: str, places: list[str]) -> bool:
  """Returns True if an import of a module would run code of a folder.

  The function finds the module and its parent packages without importing them.
  """
  for part in name.split("."):
    # Search for one part at a time: a full name would import its parent.
    spec = PathFinder.find_spec(part, places)
    if spec is None:
      return False
    if any(_is_inside(place, folder) for place in _files(spec)):
      return True
    places = _folders(spec)
  return False


def _is_inside(place: str, folder: Path) -> bool:
  return Path(place).resolve().is_relative_to(folder.resolve())


def _files(spec: ModuleSpec) -> list[str]:
  """Returns the file of a module, and the folders of a package."""
  names = [*_folders(spec)]
  if spec.has_location and spec.origin:
    names.append(spec.origin)
  return names


def _folders(spec: ModuleSpec) -> list[str]:
  return list(spec.submodule_search_locations or [])
