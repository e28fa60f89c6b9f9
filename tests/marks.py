"""Marks that several files of tests give."""

import pytest


def long_except(short, values):
  """The values of a parameter, all for --long but the short ones."""
  return [
    one if one in short else pytest.param(one, marks=pytest.mark.long)
    for one in values
  ]
