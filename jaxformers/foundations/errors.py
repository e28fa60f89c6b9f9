"""Exceptions whose message is written for the user."""

from __future__ import annotations


class UserError(ValueError):
  """Error that the user can fix, such as a wrong option, file or data set.

  The message names the value, the choices and the remedy. Commands print the
  message without a traceback.

  Example:
    >>> import jaxformers as jf
    >>> try:
    ...   jf.MODELS["transfomer"]
    ... except jf.UserError as error:
    ...   print(str(error).partition(" Choices")[0])
    Unknown model 'transfomer'. Did you mean 'transformer'?
  """


class DivergedError(UserError, FloatingPointError):
  """Error for a loss or a parameter that is not finite."""
