"""Ranges of options, declared by annotations.

An option of a mixer, block, task, optimiser or schedule is a keyword of a
function or a field of a class. A field of a run is a field of `RunConfig`. The
annotation of the option declares its values: `bool`, `str`, a `Mapping`, or a
number with an `Interval`, such as `Size` below or
`Annotated[int, Interval("[2, 100]")]`.
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
  """Interval of the numbers that an option accepts.

  Attributes:
    text: notation of the interval, such as "[0, 1)". A parenthesis excludes the
      end. An end may be a power, such as 2^31.

  Example:
    >>> from jaxformers.foundations.ranges import Interval
    >>> 0.0 in Interval("[0, 1)"), 1.0 in Interval("[0, 1)")
    (True, False)
  """

  text: str

  def __str__(self) -> str:
    return self.text

  def __contains__(self, value: float) -> bool:
    low, high = (_number(end) for end in self.text[1:-1].split(","))
    # NaN fails every comparison. No interval contains infinity.
    above = low < value or (self.text[0] == "[" and low == value)
    below = value < high or (self.text[-1] == "]" and value == high)
    return above and below


def _number(text: str) -> float:
  """Parses a number, such as "0.5", or a power, such as "2^31"."""
  base, _, exponent = text.strip().partition("^")
  return int(base) ** int(exponent) if exponent else float(base)


# Ranges of integers. Seeds and counts are int32 in JAX.
Count = Annotated[int, Interval("[0, 2^31)")]
PositiveCount = Annotated[int, Interval("[1, 2^31)")]
SmallCount = Annotated[int, Interval("[1, 1000]")]
Length = Annotated[int, Interval("[0, 2^24]")]  # 0: length of the task.
Size = Annotated[int, Interval("[1, 2^20]")]
OptionalSize = Annotated[int, Interval("[0, 2^20]")]  # The option defines 0.
Width = Annotated[int, Interval("[1, 2^16]")]
# Ranges of real numbers.
Share = Annotated[float, Interval("[0, 1]")]
PositiveShare = Annotated[float, Interval("(0, 1]")]
Fraction = Annotated[float, Interval("[0, 1)")]
Deviation = Annotated[float, Interval("[0, 100]")]
Scale = Annotated[float, Interval("(0, 100]")]
Factor = Annotated[float, Interval("(0, 1000]")]
Weight = Annotated[float, Interval("[0, 1000]")]

# Types that a value of each kind may have, and the kind in words. The types
# include the numbers of NumPy, and paths.
_KINDS: dict[type, tuple[Any, str]] = {
  int: (numbers.Integral, "an integer"),
  float: (numbers.Real, "a number"),
  bool: (bool, "True or False"),
  str: ((str, os.PathLike), "text"),
  dict: ((Mapping, ConfigDict), "a section of fields"),
}


@dataclasses.dataclass(frozen=True)
class Range:
  """Values that an option accepts.

  Attributes:
    kind: int, float (which accepts integers), bool, str or dict.
    interval: interval of the numbers; None for no bounds.
    is_list: True for a list of values.
    is_optional: True if None is also allowed.
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
    """Returns the kind of the values in words."""
    return _KINDS[self.kind][1]

  def check(self, path: str, value: Any) -> None:
    """Raises UserError if a value is out of range or has another type.

    Args:
      path: name of the option with its sections, such as "config.optimizer.b2".
      value: value of the option.
    """
    # Check the outer type, and then every value of a list.
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
    is_flag = isinstance(value, bool)  # In Python, True is also an integer.
    is_type = isinstance(value, _KINDS[self.kind][0])
    return is_type and is_flag == (self.kind is bool)


def check(owner: Any, options: Mapping[str, Any], section: str = "") -> None:
  """Raises UserError for the first option that is out of its range.

  Options without a range are not checked.

  Args:
    owner: function or class that has the options.
    options: values of the options by name.
    section: path of the options, such as "config.model"; "" for arguments of a
      function.
  """
  allowed = of(owner)
  for name, value in options.items():
    if name in allowed:
      allowed[name].check(f"{section}.{name}" if section else name, value)


def refuse_unused(owner: Any, names: Sequence[str], reason: str) -> None:
  """Raises UserError for options without effect that are not their defaults.

  Args:
    owner: instance of a dataclass.
    names: names of its attributes that have no effect.
    reason: why, and what to do about it.
  """
  values, defaults = (
    {name: getattr(source, name) for name in names}
    for source in (owner, type(owner))
  )
  refuse_changed(values, defaults, reason)


def refuse_changed(
  values: Mapping[str, Any], defaults: Mapping[str, Any], reason: str
) -> None:
  """Raises UserError for values without effect that are not their defaults.

  Args:
    values: values that have no effect, by name.
    defaults: defaults of these names, and maybe of others.
    reason: why, and what to do about it.
  """
  changed = [
    f"{name}={value!r}"
    for name, value in values.items()
    if value != defaults[name]
  ]
  if changed:
    raise UserError(f"{', '.join(changed)}: no effect, since {reason}")


def of(owner: Any) -> Mapping[str, Range]:
  """Returns the ranges of the options of a function or a class, by name.

  An option whose annotation cannot be evaluated has no range. Names that are
  imported under `TYPE_CHECKING` are an example.

  Args:
    owner: function or class. Or an object with an attribute `owners`, which
      lists the functions and classes that have the options of the object.

  Example:
    >>> from jaxformers.foundations.ranges import Fraction, of
    >>> def scale(x, *, rate: Fraction = 0.5):
    ...   return rate * x
    >>> print(of(scale)["rate"])
    a number in [0, 1)
  """
  ranges: dict[str, Range] = {}
  for part in getattr(owner, "owners", (owner,)):
    while isinstance(part, functools.partial):
      part = part.func
    # Other callables, such as instances, have no annotations.
    if isinstance(part, type | types.FunctionType):
      ranges |= _of_part(part)
  return ranges


@functools.cache
def _of_part(part: Any) -> Mapping[str, Range]:
  """Returns the ranges of one function, or of one class and its bases."""
  ranges: dict[str, Range] = {}
  is_class = inspect.isclass(part)
  # Read the bases before the class, so that the class overrides them.
  for place in reversed(part.__mro__) if is_class else [inspect.unwrap(part)]:
    names = vars(sys.modules[place.__module__])
    # `vars`, because a class without annotations shows its base's annotations.
    hints = vars(place).get("__annotations__", {})
    hints = hints if is_class else place.__annotations__
    for name, hint in hints.items():
      if span := _read(_resolve(hint, names)):
        ranges[name] = span
  return ranges


def _resolve(hint: Any, names: dict[str, Any]) -> Any:
  """Evaluates an annotation; returns None if the evaluation fails."""
  text = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
  if not isinstance(text, str):
    return text
  try:
    return eval(text, names)
  except Exception:  # The user's expression may raise any error.
    return None


def _read(hint: Any) -> Range | None:
  """Returns the range that an annotation declares, or None."""
  kind, arguments = typing.get_origin(hint), typing.get_args(hint)
  # Annotated[int, Interval(...)]: a number with an interval.
  if kind is Annotated:
    inner = _read(arguments[0])
    intervals = [a for a in arguments[1:] if isinstance(a, Interval)]
    if inner and intervals:
      return dataclasses.replace(inner, interval=intervals[0])
    return inner
  # `int | None`, or a number or a function of the step: one range at most.
  if kind in (typing.Union, types.UnionType):
    spans = [span for span in map(_read, arguments) if span]
    if len(spans) != 1:
      return None
    is_optional = type(None) in arguments
    return dataclasses.replace(spans[0], is_optional=is_optional)
  # tuple[int, ...] and Sequence[int]: a list.
  is_list = kind is tuple and arguments[1:] == (...,)
  if is_list or (kind is Sequence and len(arguments) == 1):
    inner = _read(arguments[0])
    return inner and dataclasses.replace(inner, is_list=True)
  # A section of fields, or a plain type.
  if kind is Mapping or hint is Mapping:
    return Range(dict)
  is_kind = inspect.isclass(hint) and hint in _KINDS
  return Range(hint) if is_kind else None
