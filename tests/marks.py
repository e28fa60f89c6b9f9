"""Marks and flags of XLA that several files of tests share."""

import shutil
from importlib import metadata

import pytest

# Path of a browser that opens pages; None where there is none.
BROWSER = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))),
  None,
)

# Programs are compiled in half the time, and are as they are otherwise. From
# 0.11 on jaxlib no longer knows the flag, and ends at one that it does not.
FAST_COMPILE = (
  "--xla_cpu_use_fusion_emitters=false"
  if metadata.version("jaxlib").startswith("0.10.")
  else ""
)


def long_except(short, values):
  """Returns the values of a parameter; all but the short ones need --long."""
  return [
    value if value in short else pytest.param(value, marks=pytest.mark.long)
    for value in values
  ]
