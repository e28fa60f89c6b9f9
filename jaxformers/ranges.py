"""Ranges of options, declared in the annotations of their owners.

An option of a mixer, block, task, optimiser or schedule is a keyword of a
function or a field of a class, and a field of a run one of `RunConfig`. Its
annotation says what it can be: `bool`, `str`, a `Mapping`, or a number with an
`Interval`, such as `Size` below or `Annotated[int, Interval("[2, 100]")]`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from ml_collections import ConfigDict

from jaxformers.errors import UserError


@dataclasses.dataclass(frozen=True)
class Interval:
  """Lowest and highest number of an option.

  Attributes:
    text: "[0, 1)", for example: a parenthesis excludes the end, and 2^31 is a
      power.
  """

  text: str

  def __str__(self) -> str:
    return self.text

  def __contains__(self, value: float) -> bool:
    low, high = (_number(end) for end in self.text[1:-1].split(","))
    # NaN fails every comparison, and infinity is outside of every interval.
    above = low < value or (self.text[0] == "[" and low == value)
    below = value < high or (self.text[-1] == "]" and value == high)
    return above and below


def _number(text: str) -> float:
  """Returns the number that "0.5" or the power "2^31" stands for."""
  base, _, exponent = text.strip().partition("^")
  return int(base) ** int(exponent) if exponent else float(base)


# Integers. Seeds and counts are int32 in JAX.
Count = Annotated[int, Interval("[0, 2^31)")]
PositiveCount = Annotated[int, Interval("[1, 2^31)")]
SmallCount = Annotated[int, Interval("[1, 1000]")]
Length = Annotated[int, Interval("[0, 2^24]")]  # 0 for the task's.
Size = Annotated[int, Interval("[1, 2^20]")]
OptionalSize = Annotated[int, Interval("[0, 2^20]")]  # 0 has its own meaning.
Width = Annotated[int, Interval("[1, 2^16]")]
# Real numbers.
Share = Annotated[float, Interval("[0, 1]")]
PositiveShare = Annotated[float, Interval("(0, 1]")]
Fraction = Annotated[float, Interval("[0, 1)")]
Deviation = Annotated[float, Interval("[0, 100]")]
Scale = Annotated[float, Interval("(0, 100]")]
Factor = Annotated[float, Interval("(0, 1000]")]
Weight = Annotated[float, Interval("[0, 1000]")]

# Types that a value of a kind may have, such as numbers of NumPy and paths, and
# the kind in words.
_KINDS: dict[type, tuple[Any, str]] = {
  int: (numbers.Integral, "an integer"),
  float: (numbers.Real, "a number"),
  bool: (bool, "True or False"),
  str: ((str, os.PathLike), "text"),
  dict: ((Mapping, ConfigDict), "a section of fields"),
}


@dataclasses.dataclass(frozen=True)
class Range:
  """Values that an option can have.

  Attributes:
    kind: int, float (which accepts integers), bool, str or dict.
    interval: lowest and highest number; None if there is none.
    is_list: True for a list of such values.
  """

  kind: type
  interval: Interval | None = None
  is_list: bool = False

  def __str__(self) -> str:
    """Describes the values in words."""
    place = f" in {self.interval}" if self.interval else ""
    return ("a list, each " if self.is_list else "") + self.noun + place

  @property
  def noun(self) -> str:
    """Kind of the values in words."""
    return _KINDS[self.kind][1]

  def check(self, path: str, value: Any) -> None:
    """Raises UserError for a value out of range or of another type.

    Args:
      path: name of the option with its sections, such as "config.optimizer.b2".
      value: value of the option.
    """
    if self.is_list and not isinstance(value, list | tuple):
      raise UserError(f"{path}={value!r} is not of type list: give {self}.")
    for entry in value if self.is_list else [value]:
      if not self._is_kind(entry):
        name = self.kind.__name__
        raise UserError(f"{path}={value!r} is not of type {name}: give {self}.")
      if self.interval and entry not in self.interval:
        raise UserError(
          f"{path}={value!r} is not in {self.interval}: give {self.noun} "
          "in that range."
        )

  def _is_kind(self, value: Any) -> bool:
    is_flag = isinstance(value, bool)  # For Python, True is also an integer.
    is_type = isinstance(value, _KINDS[self.kind][0])
    return is_type and is_flag == (self.kind is bool)


def check(owner: Any, options: Mapping[str, Any], section: str = "") -> None:
  """Raises UserError for the first option that is out of its range.

  Options without a range are not checked.

  Args:
    owner: function or class of the options.
    options: values of options.
    section: path of the options, such as "config.model"; "" for arguments of a
      function.
  """
  allowed = of(owner)
  for name, value in options.items():
    if name in allowed:
      allowed[name].check(f"{section}.{name}" if section else name, value)


@functools.cache
def of(owner: Any) -> Mapping[str, Range]:
  """Returns the ranges of the options of a function or a class, by name.

  Args:
    owner: function or class; or a registered factory, whose attribute
      `owners` lists the functions and classes that have its options.
  """
  ranges: dict[str, Range] = {}
  for part in getattr(owner, "owners", (owner,)):
    while isinstance(part, functools.partial):
      part = part.func
    hints = typing.get_type_hints(part, include_extras=True)
    found = {name: _read(hint) for name, hint in hints.items()}
    ranges |= {name: span for name, span in found.items() if span}
  return ranges


def _read(hint: Any) -> Range | None:
  """Returns the range that an annotation stands for; None for no option."""
  kind, arguments = typing.get_origin(hint), typing.get_args(hint)
  if kind is Annotated:
    inner = _read(arguments[0])
    intervals = [a for a in arguments[1:] if isinstance(a, Interval)]
    if inner and intervals:
      return dataclasses.replace(inner, interval=intervals[0])
    return inner
  if kind in (typing.Union, types.UnionType):
    # `int | None`, or a number or a function of the step.
    return next(filter(None, map(_read, arguments)), None)
  if kind is tuple or kind is Sequence:
    inner = _read(arguments[0])
    return inner and dataclasses.replace(inner, is_list=True)
  if kind is Mapping or hint is Mapping:
    return Range(dict)
  return Range(hint) if hint in _KINDS else None


def names(owners: Iterable[Any]) -> set[str]:
  """Returns the names of all options of some functions and classes."""
  return {name for owner in owners for name in of(owner)}
