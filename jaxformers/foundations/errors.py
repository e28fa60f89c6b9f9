"""Exceptions whose message is written for the user."""

from __future__ import annotations


class UserError(ValueError):
  """Error that the user can fix, such as a wrong option, file or data set.

  The message names the value, the choices and the remedy. Commands print the
  message without a traceback.

  Example:
    >>> import jaxformers as jf
    >>> try:
    ...   jf.MODELS["transject2"]
    ... except jf.UserError as error:
    ...   print(str(error).partition(" Choices")[0])
    Unknown model 'transject2'. Did you mean 'transject'?
  """


class DivergedError(UserError, FloatingPointError):
  """Error for a loss or a parameter that is not finite."""
