"""Grids of arguments and fields of configs: axes, and their combinations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxformers.config import FIELDS, SECTIONS
from jaxformers.foundations.errors import UserError

Axis = tuple[str, tuple[str, ...]]  # An argument or a field, and its values.
Pairs = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination of the grid.

  Attributes:
    path: path of the config file.
    arguments: (key, value) of the config's arguments, in the order of the grid.
    fields: (key, value) of fields of the run that the grid varies.
    settings: (key, value) of fields that are set in this cell but are not part
      of its name.
  """

  path: str
  arguments: Pairs = ()
  fields: Pairs = ()
  settings: Pairs = ()

  def extended(self, key: str, value: str) -> Cell:
    """Returns the cell with one more argument or field."""
    name = "fields" if is_field(key) else "arguments"
    values: Any = (*getattr(self, name), (key, value))
    return dataclasses.replace(self, **{name: values})

  @property
  def spec(self) -> str:
    """Config with its arguments, as `--config` takes it."""
    text = _join(self.arguments)
    return f"{self.path}:{text}" if text else self.path

  @property
  def options(self) -> list[str]:
    """Command-line arguments that set the fields."""
    return [f"--config.{k}={v}" for k, v in (*self.fields, *self.settings)]

  @property
  def title(self) -> str:
    """Config with its arguments and fields, as a title."""
    return f"{self.spec} {_join(self.fields)}".strip()

  @property
  def folder(self) -> Path:
    """Folder of the cell's runs, such as lra_text/model=transject,size=tiny."""
    path = Path(self.path)
    # A config in the working directory has no parent folder to name.
    name = "_".join(part for part in (path.parent.name, path.stem) if part)
    # A value may be a path, which must not add folders here.
    values = _join((*self.arguments, *self.fields))
    return Path(name, values.replace("/", "_"))

  def matches(self, where: Sequence[tuple[str, str]]) -> bool:
    """Returns True if the cell has all values; config=NAME matches its file."""
    pairs = {*self.arguments, *self.fields, ("config", Path(self.path).stem)}
    return pairs.issuperset(where)


def _join(pairs: Iterable[tuple[str, str]]) -> str:
  return ",".join(f"{key}={value}" for key, value in pairs)


def is_field(key: str) -> bool:
  """Returns True for a field of the run, False for an argument of a config."""
  # A section, such as model, is an argument.
  return "." in key or (key in FIELDS and key not in SECTIONS)


def parse_setting(text: str) -> tuple[list[tuple[str, str]], Pairs]:
  """Parses "KEY=VALUE,...:FIELD=VALUE,..." into conditions and fields.

  Raises:
    UserError: for a text of another form.
  """
  # Split both sides of the colon into pairs.
  where, colon, what = text.partition(":")
  pairs = [
    [
      (key, value)
      for key, _, value in (item.partition("=") for item in part.split(","))
    ]
    for part in (where, what)
  ]
  if not colon or not all(k and v for part in pairs for k, v in part):
    raise UserError(
      f"--set {text}: write WHERE:FIELD=VALUE, such as "
      "model=transject:batch_size=16 or config=text:task.archive=PATH."
    )
  # Only fields of the run can be set.
  for key, _ in pairs[1]:
    if key == "seed" or not is_field(key):
      raise UserError(
        f"--set {text}: {key} is not a field of a run, such as batch_size or "
        "model.num_layers. Give arguments of a config by --grid, and seeds by "
        "--seeds."
      )
  return pairs[0], tuple(pairs[1])


def set_fields(cells: Sequence[Cell], texts: Sequence[str]) -> list[Cell]:
  """Returns the cells with the fields that `--set` sets in some of them.

  Raises:
    UserError: if a text is not a setting, or if it matches no cell.
  """
  for text in texts:
    where, what = parse_setting(text)
    if not any(cell.matches(where) for cell in cells):
      raise UserError(
        f"--set {text}: no run of the grid has {_join(where)}. The first has "
        f"{_join((('config', Path(cells[0].path).stem), *cells[0].arguments))}."
      )
    # Add the fields to the cells that match.
    cells = [
      dataclasses.replace(cell, settings=(*cell.settings, *what))
      if cell.matches(where)
      else cell
      for cell in cells
    ]
  return list(cells)


def parse_axis(text: str) -> Axis:
  """Parses "KEY=VALUE,VALUE" into (KEY, values).

  Raises:
    UserError: for a text of another form, or for a repeated value.
  """
  key, equals, listed = text.partition("=")
  values = tuple(value.strip() for value in listed.split(","))
  if not key.strip() or not equals or not all(values):
    raise UserError(
      f"{text!r} is not an axis of a grid: write KEY=VALUE,VALUE."
    )
  if len({*values}) < len(values):
    raise UserError(f"{text!r} names a value twice: remove one.")
  return key.strip(), values


def expand(specs: Sequence[str], axes: Sequence[Axis]) -> list[Cell]:
  """Returns all combinations of the axes; the last axis changes fastest.

  Args:
    specs: configs as path.py or path.py:key=value,...
    axes: results of `parse_axis`.

  Raises:
    UserError: if an argument is set twice, or if a seed is given.
  """
  # Check the keys of the axes.
  keys = [key for key, _ in axes]
  for key in keys:
    if keys.count(key) > 1:
      raise UserError(f"{key} is an axis twice: list its values in one axis.")
  if "seed" in keys:
    raise UserError(
      "seed is not an axis: give --seeds, so that they are averaged."
    )
  cells = []
  for spec in specs:
    path, _, text = spec.partition(":")
    # An argument of a config is an axis of one value: it contains no comma.
    fixed = [parse_axis(item) for item in text.split(",") if item]
    all_keys = [*keys, *(key for key, _ in fixed)]
    for key, _ in fixed:
      if all_keys.count(key) > 1:
        raise UserError(f"{key} is set twice, by {spec} or --grid: remove one.")
      if key == "seed":
        raise UserError(f"{spec}: give --seeds, such as --seeds 0,1,2.")
    # Combine all values of all axes.
    start = Cell(path, tuple((key, value) for key, (value,) in fixed))
    for values in itertools.product(*(values for _, values in axes)):
      cell = start
      for key, value in zip(keys, values, strict=True):
        cell = cell.extended(key, value)
      cells.append(cell)
  return cells
