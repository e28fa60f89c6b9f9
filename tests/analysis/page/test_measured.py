"""Rows of the figures of trained models."""

import types
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.page import measured
from jaxformers.analysis.tables.runs import RunRecord, group_by_recipe
from tests import initial


def test_data_are_described_by_what_was_read():
  """Not by --samples and --length, where a run has fewer."""
  model = models.build(
    "transject", vocab_size=9, max_len=6, num_classes=2, d_model=8, num_layers=1
  )
  ids = np.array([[1, 2, 3, 4, 5, 0], [1, 2, 3, 0, 0, 0]])
  params = model.init(jax.random.key(0), ids, train=False)["params"]
  run = types.SimpleNamespace(
    model=model, params=params, start=None, sample=lambda count, length: ids
  )
  rows = measured.Rows(measured.Options(samples=32, length=512))
  rows.add_model("one", 0, run, start=False)
  assert rows.describe_data() == "2 test samples of at most 5 tokens, 1 seed"


def test_what_is_measured_of_the_last_layer_against_sizes():
  def record(seed, num_layers):
    model = {"name": "local", "num_layers": num_layers, "d_model": 8}
    config = {"seed": seed, "task": {"name": "text"}, "model": model}
    return RunRecord(Path("run"), config, {})

  groups = group_by_recipe([record(0, 1), record(1, 1), record(0, 2)])
  rows = measured.Rows(measured.Options())
  few, many = (group.label for group in groups)
  rows.of["factors"] = [
    *((few, seed, 1, k, 2.0 + seed + k) for seed in (0, 1) for k in (0, 2)),
    *((many, 0, layer, k, 10.0 * layer) for layer in (0, 1, 2) for k in (0, 1)),
  ]
  line = "text local (d_model=8)"
  assert measured._last_layer(groups, rows, "factors") == [
    (line, 0, "num_layers", 1, 3.0),
    (line, 1, "num_layers", 1, 4.0),
    (line, 0, "num_layers", 2, 20.0),
  ]
  assert measured._last_layer(groups[:1], rows, "factors") == []
  # Over layers, without the embedding; where nothing varies there is none.
  rows.of["entropy"] = [(*row[:4], -row[4]) for row in rows.of["factors"]]
  assert measured._correlations(rows) == f"{few} -1.00, {many} -1.00"
  rows.of["factors"] = rows.of["factors"][:1]
  assert measured._correlations(rows) == "none"


WORDS = ("<pad>", "<unk>", *"abcdefgh")
SIZES = {"num_classes": 2, "d_model": 8, "num_layers": 2}


def run_of(model, ids, **task):
  """Returns a run of a model with its start, on a task of few fields."""
  params = initial.params(model, ids)
  fields = {"image": (), "vocabulary": WORDS, "max_len": 8, "name": "t"}
  return types.SimpleNamespace(
    model=model,
    params=params,
    start=None,
    sample=lambda count, length: ids[:count],
    task=types.SimpleNamespace(**fields | task),
  )


@pytest.mark.parametrize("causal", [False, True])
def test_maps_of_a_causal_classifier_are_lower_triangular(causal):
  mixer = {"num_heads": 1, "causal": causal}
  sizes = SIZES | {"vocab_size": len(WORDS), "max_len": 8}
  model = models.build("transformer", mixer=mixer, **sizes)
  ids = np.array([[2, 3, 4, 5, 6, 7, 8, 0]], np.int32)
  run = run_of(model, ids, encode=lambda text, length: ids[0, :7])
  rows = measured.Rows(measured.Options())
  rows.add_tokens("run", run)
  later = [row[-1] for row in rows.of["maps"] if row[3] > row[2]]
  assert len(later) == 2 * 21
  assert any(later) != causal
