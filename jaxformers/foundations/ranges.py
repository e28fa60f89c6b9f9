"""Ranges of options, declared in the annotations of their owners.

An option of a mixer, block, task, optimiser or schedule is a keyword of a
function or a field of a class, and a field of a run one of `RunConfig`. Its
annotation says what it can be: `bool`, `str`, a `Mapping`, or a number with an
`Interval`, such as `Size` below or `Annotated[int, Interval("[2, 100]")]`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ml_collections import ConfigDict

from jaxformers.foundations.errors import UserError


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
    is_optional: True if None is allowed, too.
  """

  kind: type
  interval: Interval | None = None
  is_list: bool = False
  is_optional: bool = False

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
    if value is None and self.is_optional:
      return
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


def of(owner: Any) -> Mapping[str, Range]:
  """Returns the ranges of the options of a function or a class, by name.

  An annotation that cannot be read, such as one of a name under
  `TYPE_CHECKING`, stands for no range.

  Args:
    owner: function or class; or what has an attribute `owners`, which lists the
      functions and classes that have its options.
  """
  ranges: dict[str, Range] = {}
  for part in getattr(owner, "owners", (owner,)):
    while isinstance(part, functools.partial):
      part = part.func
    # Other callables, such as instances, have no annotations of their own.
    if isinstance(part, type | types.FunctionType):
      ranges |= _of_part(part)
  return ranges


@functools.cache
def _of_part(part: Any) -> Mapping[str, Range]:
  """Returns the ranges of one function, or of one class and its bases."""
  ranges: dict[str, Range] = {}
  is_class = inspect.isclass(part)
  for place in reversed(part.__mro__) if is_class else [inspect.unwrap(part)]:
    names = vars(sys.modules[place.__module__])
    # A class without annotations would show those of its base.
    hints = vars(place).get("__annotations__", {})
    hints = hints if is_class else place.__annotations__
    for name, hint in hints.items():
      if span := _read(_resolve(hint, names)):
        ranges[name] = span
  return ranges


def _resolve(hint: Any, names: dict[str, Any]) -> Any:
  """Returns what an annotation stands for; None if it cannot be told."""
  text = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
  if not isinstance(text, str):
    return text
  try:
    return eval(text, names)
  except Exception:  # Any error of the user's expression.
    return None


def _read(hint: Any) -> Range | None:
  """Returns the range that an annotation stands for; None for none."""
  kind, arguments = typing.get_origin(hint), typing.get_args(hint)
  if kind is Annotated:
    inner = _read(arguments[0])
    intervals = [a for a in arguments[1:] if isinstance(a, Interval)]
    if inner and intervals:
      return dataclasses.replace(inner, interval=intervals[0])
    return inner
  if kind in (typing.Union, types.UnionType):
    # `int | None`, or a number or a function of the step: of one kind at most.
    spans = [span for span in map(_read, arguments) if span]
    if len(spans) != 1:
      return None
    is_optional = type(None) in arguments
    return dataclasses.replace(spans[0], is_optional=is_optional)
  is_list = kind is tuple and arguments[1:] == (...,)
  if is_list or (kind is Sequence and len(arguments) == 1):
    inner = _read(arguments[0])
    return inner and dataclasses.replace(inner, is_list=True)
  if kind is Mapping or hint is Mapping:
    return Range(dict)
  is_kind = inspect.isclass(hint) and hint in _KINDS
  return Range(hint) if is_kind else None
