"""Exceptions whose message is for the user of a command, not for its author."""

from __future__ import annotations


class UserError(ValueError):
  """A mistake that a user can mend: an option, a file, a data set.

  Its message names the value, the choices and the remedy. Commands print it
  without a traceback.
  """


class DivergedError(UserError, FloatingPointError):
  """A loss or a parameter that is not finite."""
