"""Marks, mixers and flags of XLA that several test files share."""

import shutil
from importlib import metadata

import pytest

# Path of a browser that opens pages; None if no browser is installed.
BROWSER = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))),
  None,
)

# Flags that halve the time of compilation without changing results. One LLVM
# module for all kernels of a program takes a sixth less time than 32 modules.
# From version 0.11 on, jaxlib rejects the first flag.
FAST_COMPILE = (
  "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
  if metadata.version("jaxlib").startswith("0.10.")
  else ""
)


def long_except(short, values):
  """Marks all values of a parameter except the short ones for --long."""
  return [
    value if value in short else pytest.param(value, marks=pytest.mark.long)
    for value in values
  ]


def slow_except(quick, values, short=None):
  """Marks all values of a parameter except the quick ones for --all.

  Args:
    quick: values that the default tests run.
    values: all values, including `quick`.
    short: values that --all also runs; the other values need --long. None for
      all values.
  """

  def marks(value):
    if value in quick:
      return ()
    is_short = short is None or value in short
    return (pytest.mark.slow if is_short else pytest.mark.long,)

  return [pytest.param(value, marks=marks(value)) for value in values]


# One mixer of each kind: certified, linear, in blocks, a scan of a recurrence,
# a state space, exact attention and TransJect's. --all tests the other mixers.
REPRESENTATIVES = (
  "allpass",
  "linear",
  "local",
  "mega",
  "s5",
  "softmax",
  "transject",
)
