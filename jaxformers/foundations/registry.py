"""Registries of names that a config can choose, and errors that list them."""

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
  """Returns the error to raise for a name that is not one of the choices.

  Args:
    kind: noun for the choices, in the singular ("model", "config key").
    name: unknown name.
    choices: valid names.
  """
  choices = sorted(str(choice) for choice in choices)
  # The closest choice is most likely what was meant.
  close = difflib.get_close_matches(str(name), choices, n=1)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  listed = ", ".join(choices) or "none"
  return UserError(f"Unknown {kind} {name!r}.{hint} Choices: {listed}.")


def choose(kind: str, name: str, choices: Iterable[str]) -> str:
  """Returns the name; raises UserError if it is not one of the choices."""
  # An iterator could be read only once.
  choices = list(choices)
  if name not in choices:
    raise unknown(kind, name, choices)
  return name


def call(
  kind: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Any:
  """Returns `function(**options)`.

  Args:
    kind: owner of the options in the message ("mixer 'softmax'").
    function: function or class, whose keyword arguments are the choices.
    options: keyword arguments.

  Raises:
    UserError: for an unknown or a missing option.
  """
  check_options(kind, function, options)
  # Find required options first: Python's TypeError is not a message for users.
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
  """Raises UserError for an option that a function does not take."""
  accepted = inspect.signature(function).parameters
  # A function that takes any keyword checks its options itself.
  if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
    return
  for option in options:
    if option not in accepted:
      raise unknown(f"option of {kind}", option, accepted)


def summarize(entry: Any) -> str:
  """Returns the first line of the docstring of an entry, or ""."""
  return (inspect.getdoc(entry) or "").partition("\n")[0]


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
  """Makes a function name the keyword that was meant for one it does not take.

  The function then raises UserError, with the choices, and no TypeError.
  """
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
  """Mapping from names to entries, which a decorator adds.

  An unknown name raises `UserError`, which lists the choices.
  """

  def __init__(self, kind: str, *, is_open: bool = False) -> None:
    """Makes an empty registry.

    Args:
      kind: noun for its entries in messages, in the singular.
      is_open: True if modules of users, which a config names, add entries.
    """
    super().__init__()
    self.kind = kind
    self.is_open = is_open

  def register(self, name: str) -> Callable[[Any], Any]:
    """Returns a decorator that adds an entry under a name."""

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
