"""The notebooks of examples/ run from their first cell, at a reduced size."""

import itertools
import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import jaxformers as jf
from examples import episodes
from examples.run import has_tag
from jaxformers.training import optim
from tests.marks import long_except

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Values of the cell of parameters, where they are others than in the notebook.
REDUCED = {
  "1_train_and_look": {"steps": 2},
  "2_back_to_the_tokens": {"steps": 2, "layers": 2, "count": 100},
  "3_over_smoothing": {"steps": 2, "layers": 2, "archive": "random"},
  "5_add_your_own_mixer": {"steps": 4},
  "6_your_own_data": {"steps": 6, "count": 200},
  "7_read_a_models_mind": {"steps": 2},
}


def cells(path):
  return json.loads(path.read_text())["cells"]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, data_dir):
  """A folder in which runs of notebooks may lie."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("JAXFORMERS_DATA_DIR", str(data_dir))
  monkeypatch.setattr(plt, "show", lambda: None)
  for registry in (jf.MIXERS, jf.MODELS, optim.OPTIMIZERS):
    monkeypatch.setattr(registry, "data", dict(registry.data))
  yield
  plt.close("all")


def test_labels_of_episodes_are_the_cues_since_the_last_reset():
  stream = itertools.islice(episodes.episodes(0), 4)
  tokens, resets, labels = (
    np.concatenate(a, 1) for a in zip(*stream, strict=True)
  )
  assert resets[:, 0].all()
  lengths = []
  for row in range(len(tokens)):
    seen, length = 0, 0
    for token, reset, label in zip(
      tokens[row], resets[row], labels[row], strict=True
    ):
      if reset:
        lengths.append(length)
        seen, length = 0, 0
      length += 1
      seen = token if token <= episodes.CUES else seen
      assert label == seen
  lengths = [n for n in lengths if n]
  assert (min(lengths), max(lengths)) == (8, 24)


@pytest.mark.long
def test_a_memory_needs_resets():
  shares = {
    uses: episodes.train(uses_resets=uses, steps=200) for uses in (0, 1)
  }
  assert shares[1] > 0.98 > 0.9 > shares[0]


QUICK = [path for path in NOTEBOOKS if path.stem[0] == "4"]


@pytest.mark.parametrize(
  "path", long_except(QUICK, NOTEBOOKS), ids=lambda path: path.stem
)
def test_notebook_runs(path, elsewhere):
  names = {"__name__": "__main__"}
  for number, cell in enumerate(cells(path)):
    if cell["cell_type"] != "code" or has_tag(cell, "install"):
      continue
    source = "".join(cell["source"])
    exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
    if has_tag(cell, "parameters"):
      reduced = REDUCED.get(path.stem, {})
      assert reduced.keys() <= names.keys()
      names |= reduced


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_outputs_and_no_machine_paths(path):
  """It has outputs, no error, and nothing of the machine that made them."""
  content = cells(path)
  outputs = [o for c in content for o in c.get("outputs", ())]
  assert outputs
  assert not [o for o in outputs if o["output_type"] == "error"]
  text = path.read_text()
  assert not re.search(r"/(home|root|work|tmp)/", text)
  assert len(text) < 500_000
  install = [c for c in content if has_tag(c, "install")]
  assert len(install) == 1
  assert "%pip install" in "".join(install[0]["source"])


def test_examples_page_lists_every_notebook():
  page = (ROOT / "examples" / "README.md").read_text()
  for path in NOTEBOOKS:
    assert f"]({path.name})" in page
  assert "matplotlib" in sys.modules
