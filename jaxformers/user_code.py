"""Modules of a user's own code, which register mixers, blocks or tasks.

A module that a command, a config file or a call names is imported. A module
that only a folder names, such as the workdir of somebody else's run, is
imported only inside `trusting`, and never from that folder.
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

from jaxformers.errors import UserError

_is_trusted = contextvars.ContextVar("is_trusted", default=False)


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
  """Allows imports of the modules that folders name, inside the block.

  Args:
    trust: False leaves everything as it is.
  """
  token = _is_trusted.set(trust or _is_trusted.get())
  try:
    yield
  finally:
    _is_trusted.reset(token)


def import_modules(listed: Any) -> None:
  """Imports modules that the user has named.

  Modules in the working directory are found, whichever command runs.

  Args:
    listed: value of `config.imports`, names separated by commas.

  Raises:
    UserError: for a module that cannot be found.
  """
  for name in _names(listed):
    _import(name)


def import_named_by(folder: Path, listed: Any) -> None:
  """Imports modules that the files of a folder name.

  Modules that are imported already need no trust.

  Args:
    folder: folder of a trained model.
    listed: value of `config.imports` in its files.

  Raises:
    UserError: outside of `trusting`; for a module that lies in the folder; for
      a module that cannot be found.
  """
  names = [name for name in _names(listed) if name not in sys.modules]
  if names and not _is_trusted.get():
    raise UserError(
      f"{folder} needs the code of {', '.join(map(repr, names))}, which runs "
      "with your rights. If you trust this code, and whoever wrote the folder, "
      "give --trust (in Python trust=True), or import the code first."
    )
  for name in names:
    with _working_directory():
      if _lies_in(folder, name):
        raise UserError(
          f"The module {name!r}, which {folder} names, lies in that folder "
          "itself, and is never imported from there: move the module out of "
          "the folder if you trust its code."
        )
    _import(name)


def _names(listed: Any) -> list[str]:
  names = listed.split(",") if isinstance(listed, str) else [""]
  names = [name.strip() for name in names]
  parts = ".".join(names).split(".")
  if listed != "" and not all(part.isidentifier() for part in parts):
    raise UserError(
      f"config.imports={listed!r}: give names of modules, separated by commas."
    )
  return [name for name in names if name]


@contextlib.contextmanager
def _working_directory() -> Iterator[None]:
  """Puts the working directory in front of `sys.path`, inside the block."""
  folder = str(Path.cwd())
  if {"", folder} & {*sys.path}:
    yield
    return
  sys.path.insert(0, folder)
  try:
    yield
  finally:
    sys.path.remove(folder)


def _import(name: str) -> None:
  try:
    with _working_directory():
      importlib.import_module(name)
  except ModuleNotFoundError as error:
    # A module that the user's own module lacks is the user's to install.
    if error.name not in (name, name.partition(".")[0]):
      raise
    raise UserError(
      f"config.imports={name!r} cannot be imported from {Path.cwd()}: run in "
      f"the folder of {name}.py, or put that folder on PYTHONPATH."
    ) from None


def _lies_in(folder: Path, name: str) -> bool:
  """Returns True if an import of a module would run code of a folder.

  Finds the module, and the packages around it, without importing any.
  """
  places: list[str] | None = None
  parts = name.split(".")
  for count in range(1, len(parts) + 1):
    spec = PathFinder.find_spec(".".join(parts[:count]), places)
    if spec is None:
      return False
    if any(p.is_relative_to(folder.resolve()) for p in _files(spec)):
      return True
    places = list(spec.submodule_search_locations or [])
  return False


def _files(spec: ModuleSpec) -> list[Path]:
  """Returns the file of a module, and the folders of a package."""
  names = [*(spec.submodule_search_locations or [])]
  if spec.has_location and spec.origin:
    names.append(spec.origin)
  return [Path(name).resolve() for name in names]
