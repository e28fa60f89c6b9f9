"""Registries of names for configs, and errors that list the valid names."""

from __future__ import annotations

import collections
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from jaxformers.foundations.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


def unknown(kind: str, name: object, choices: Iterable[str]) -> UserError:
  """Returns the error for a name that is not one of the choices.

  Args:
    kind: singular noun for the choices, such as "model" or "config key".
    name: unknown name.
    choices: valid names.
  """
  choices = sorted(str(choice) for choice in choices)
  # Suggest the closest choice, which the user most likely meant.
  close = difflib.get_close_matches(str(name), choices, n=1)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  listed = ", ".join(choices) or "none"
  return UserError(f"Unknown {kind} {name!r}.{hint} Choices: {listed}.")


def choose(kind: str, name: str, choices: Iterable[str]) -> str:
  """Returns the name, or raises UserError if it is not one of the choices."""
  # Make a list: an iterator could be read only once.
  choices = list(choices)
  if name not in choices:
    raise unknown(kind, name, choices)
  return name


def call(
  kind: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Any:
  """Returns `function(**options)`, after a check of the names of the options.

  Args:
    kind: owner of the options in the error message, such as "mixer 'softmax'".
    function: function or class, whose keyword arguments are the choices.
    options: keyword arguments.

  Raises:
    UserError: if an option is unknown or missing.
  """
  check_options(kind, function, options)
  # Check for missing options: Python's TypeError is no message for users.
  missing = [
    name
    for name, p in inspect.signature(function).parameters.items()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    if name not in options
  ]
  if missing:
    raise UserError(f"{kind} needs {', '.join(missing)}: set each of them.")
  return function(**options)


def check_options(
  kind: str, function: Callable[..., Any], options: Iterable[str]
) -> None:
  """Raises UserError for an option that a function does not accept."""
  accepted = inspect.signature(function).parameters
  # A function that takes any keyword checks its options itself.
  if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
    return
  for option in options:
    if option not in accepted:
      raise unknown(f"option of {kind}", option, accepted)


def summarize(entry: Any) -> str:
  """Returns the first line of an entry's docstring; "" without a docstring."""
  return (inspect.getdoc(entry) or "").partition("\n")[0]


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
  """Makes a function raise UserError for an unknown keyword.

  The error replaces Python's TypeError. It suggests the closest keyword and
  lists all of them.
  """
  # Keywords that the function accepts.
  parameters = inspect.signature(function).parameters.values()
  accepted = [
    p.name
    for p in parameters
    if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"
  ]

  @functools.wraps(function)
  def checked(*args: P.args, **options: P.kwargs) -> R:
    for option in options:
      if option not in accepted:
        raise unknown(f"argument of {function.__name__}", option, accepted)
    return function(*args, **options)

  return checked


class Registry(collections.UserDict[str, Any]):
  """Mapping from names to entries; the decorator `register` adds entries.

  An unknown name raises `UserError`, which lists the known names.

  Example:
    >>> from jaxformers.foundations.registry import Registry
    >>> colours = Registry("colour")
    >>> @colours.register("red")
    ... def red():
    ...   return "#f00"
    >>> colours["red"]()
    '#f00'
  """

  def __init__(self, kind: str, *, is_open: bool = False) -> None:
    """Creates an empty registry.

    Args:
      kind: singular noun for an entry, for error messages.
      is_open: True if users' modules, which a config names, may add entries.
    """
    super().__init__()
    self.kind = kind
    self.is_open = is_open

  def register(self, name: str) -> Callable[[Any], Any]:
    """Returns a decorator that adds an entry under a name.

    Args:
      name: Name of the entry.

    Raises:
      UserError: If the name is already registered.
    """

    def add(entry: Any) -> Any:
      if name in self:
        raise UserError(f"The {self.kind} {name!r} is already registered.")
      self[name] = entry
      return entry

    return add

  def __missing__(self, name: str) -> NoReturn:
    error = unknown(self.kind, name, self)
    if self.is_open:
      remedy = "If it is your own, name its module in config.imports."
      raise UserError(f"{error} {remedy}")
    raise error
