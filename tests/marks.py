"""What several files of tests share: marks, and XLA's flags."""

from importlib import metadata

import pytest

# Programs are compiled in half the time, and are as they are otherwise. From
# 0.11 on jaxlib no longer knows the flag, and ends at one that it does not.
FAST_COMPILE = (
  "--xla_cpu_use_fusion_emitters=false"
  if metadata.version("jaxlib").startswith("0.10.")
  else ""
)


def long_except(short, values):
  """The values of a parameter, all for --long but the short ones."""
  return [
    one if one in short else pytest.param(one, marks=pytest.mark.long)
    for one in values
  ]
