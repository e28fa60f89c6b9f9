"""Marks, mixers and flags of XLA that several files of tests share."""

import shutil
from importlib import metadata

import pytest

# Path of a browser that opens pages; None where there is none.
BROWSER = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))),
  None,
)

# Programs are compiled in half the time, and are as they are otherwise: one
# module of LLVM for all kernels of a program takes a sixth less than 32. From
# 0.11 on jaxlib no longer knows the first flag, and ends at it.
FAST_COMPILE = (
  "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
  if metadata.version("jaxlib").startswith("0.10.")
  else ""
)


def long_except(short, values):
  """Returns the values of a parameter; all but the short ones need --long."""
  return [
    value if value in short else pytest.param(value, marks=pytest.mark.long)
    for value in values
  ]


def slow_except(quick, values, short=None):
  """Returns the values of a parameter; all but the quick ones need --all.

  Args:
    quick: values that the default tests run.
    values: all values, of which `quick` are some.
    short: values that --all runs, too; others need --long. None for all.
  """

  def marks(value):
    if value in quick:
      return ()
    is_short = short is None or value in short
    return (pytest.mark.slow if is_short else pytest.mark.long,)

  return [pytest.param(value, marks=marks(value)) for value in values]


# One mixer of each kind: certified, linear, in blocks, a scan of a recurrence,
# a state space, exact attention and TransJect's. The others are run by --all.
REPRESENTATIVES = (
  "allpass",
  "linear",
  "local",
  "mega",
  "s5",
  "softmax",
  "transject",
)
