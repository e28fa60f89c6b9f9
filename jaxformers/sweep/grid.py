"""Grids of config arguments: axes, and the combinations of their values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from jaxformers.errors import UserError

Axis = tuple[str, tuple[str, ...]]  # Key of an argument, and its values.


@dataclasses.dataclass(frozen=True)
class Cell:
  """One combination of the grid.

  Attributes:
    path: path of the config file.
    arguments: (key, value) of the config's arguments, in the grid's order.
  """

  path: str
  arguments: tuple[tuple[str, str], ...] = ()

  def extended(self, key: str, value: str) -> Cell:
    """Returns the cell with one more argument."""
    return Cell(self.path, (*self.arguments, (key, value)))

  @property
  def spec(self) -> str:
    """Config with its arguments, as `--config` takes it."""
    text = self._arguments_text()
    return f"{self.path}:{text}" if text else self.path

  @property
  def folder(self) -> Path:
    """Folder of its runs, such as lra_text/model=transject,size=tiny."""
    path = Path(self.path)
    # A config in the working directory has no name of a parent.
    name = "_".join(part for part in (path.parent.name, path.stem) if part)
    return Path(name, self._arguments_text())

  def _arguments_text(self) -> str:
    return ",".join(f"{key}={value}" for key, value in self.arguments)


def parse_axis(text: str) -> Axis:
  """Returns (KEY, values) of "KEY=VALUE,VALUE".

  Raises:
    UserError: for any other text, or a repeated value.
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
  """Returns all combinations, the last axis changing fastest.

  Args:
    specs: configs, as path.py or path.py:key=value,...
    axes: results of `parse_axis`.

  Raises:
    UserError: for an argument that is set twice, or a seed.
  """
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
    # An argument of the config is an axis of one value: it has no comma.
    fixed = [parse_axis(item) for item in text.split(",") if item]
    all_keys = [*keys, *(key for key, _ in fixed)]
    for key, _ in fixed:
      if all_keys.count(key) > 1:
        raise UserError(f"{key} stands in {spec} and in the grid, or twice.")
      if key == "seed":
        raise UserError(f"{spec}: give --seeds, such as --seeds 0,1,2.")
    # Combine all values of all axes.
    choices = [[(k, v) for v in values] for k, values in (*fixed, *axes)]
    cells += [Cell(path, pairs) for pairs in itertools.product(*choices)]
  return cells
