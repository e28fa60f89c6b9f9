"""Time series for tests: files of the UEA archive, and small ones."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest


def archive():
  """Folder of the data sets that sktime ships; skips the test without it."""
  found = importlib.util.find_spec("sktime")
  if found is None:
    pytest.skip("sktime is not installed, which ships small data sets.")
  return Path(found.submodule_search_locations[0]) / "datasets" / "data"


HEADER = """# A comment.
@problemName Small
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down
@data
"""


def write(folder, train, test=None, header=HEADER, name="Small"):
  """Writes both files of a data set, and returns their folder."""
  folder.mkdir(parents=True, exist_ok=True)
  for split, lines in (("TRAIN", train), ("TEST", test or train)):
    text = header + "\n".join(lines) + "\n"
    (folder / f"{name}_{split}.ts").write_text(text)
  return folder


def small(count=10, seed=0):
  """Lines of series that go up or down, of unequal lengths."""
  rng = np.random.default_rng(seed)
  lines = []
  for k in range(count):
    x = rng.normal(size=(int(rng.integers(3, 7)), 2)).cumsum(0)
    parts = (",".join(f"{v:.4f}" for v in x[:, i]) for i in range(2))
    lines.append(":".join([*parts, ("up", "down")[k % 2]]))
  return lines
