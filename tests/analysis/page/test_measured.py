"""Rows of the figures of trained models."""

import types
from pathlib import Path

import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.page import measured
from jaxformers.analysis.tables.runs import RunRecord, group_by_recipe
from jaxformers.models.capture import capture, parts
from jaxformers.models.variables import make_variables
from tests import draws, initial

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_describe_data_states_the_samples_and_lengths_read():
  """Not by --samples and --length, where a run has fewer."""
  model = models.build(
    "transject", vocab_size=9, max_len=6, num_classes=2, d_model=8, num_layers=1
  )
  ids = np.array([[1, 2, 3, 4, 5, 0], [1, 2, 3, 0, 0, 0]])
  params = initial.params(model, ids)
  run = types.SimpleNamespace(
    model=model, params=params, start=None, sample=lambda count, length: ids
  )
  rows = measured.Rows(measured.Options(samples=32, length=512))
  rows.add_model("one", 0, run, start=False)
  assert rows.describe_data() == "2 test samples of at most 5 tokens, 1 seed"


def test_last_layer_figures_are_drawn_against_varied_sizes():
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


WORDS = ("<pad>", "<unk>", *(f"{letter}word" for letter in "abcdefgh"))
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
def test_rows_have_lower_triangular_maps_for_causal_classifiers(causal):
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


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_rows_of_an_image_have_maps_of_queries_and_keys(pool):
  """NeuTRENO, figure 4: matrices between patches, not maps over patches."""
  image = {"image": (4, 6, 3), "patch_size": 2, "pool": pool}
  sizes = SIZES | {"vocab_size": 0, "max_len": 0, "num_layers": 5} | image
  mixer = {"num_heads": 2}
  model = models.build("transformer", mixer=mixer, positions="none", **sizes)
  images = draws.normal(0, (1, 4, 6, 3))
  rows = measured.Rows(measured.Options())
  rows.add_tokens("vit", run_of(model, images, image=(4, 6, 3)))
  n = 6 + (pool == "cls")
  # The layers that are drawn only, and both heads.
  assert {row[1] for row in rows.of["maps"]} == {1, 2, 4, 5}
  assert len(rows.of["maps"]) == 4 * n * n
  assert len(rows.of["heads"]) == 2 * 4 * n * n
  assert rows.of["maps"][-1][4:6] == ("1,2", "1,2")
  first = [row[-1] for row in rows.of["maps"][:n]]
  np.testing.assert_allclose(sum(first), 1, rtol=1e-4)
  assert rows.describe_inputs(images=True) == (
    "Input: a test image, 2 x 3 patches named by row and column. One seed."
  )
  assert not rows.of["pairs"]


def test_rows_refuse_an_image_of_many_patches():
  image = {"image": (64, 64, 1), "patch_size": 2}
  sizes = SIZES | {"vocab_size": 0, "max_len": 0} | image
  model = models.build("transformer", positions="none", **sizes)
  images = np.zeros((1, 64, 64, 1), np.float32)
  run = types.SimpleNamespace(
    model=model,
    sample=lambda count, length: images,
    task=types.SimpleNamespace(image=(64, 64, 1), name="t"),
  )
  rows = measured.Rows(measured.Options())
  with pytest.raises(ValueError, match="1024 patches of t.*256"):
    rows.add_tokens("vit", run)


@pytest.mark.parametrize("name", ["transformer", "transject"])
def test_rows_have_distances_inside_heads_and_experts(name):
  mixer = {"num_heads" if name == "transformer" else "num_experts": 2}
  sizes = SIZES | {"vocab_size": len(WORDS), "max_len": 8}
  model = models.build(name, mixer=mixer, **sizes)
  ids = np.array([[2, 3, 4, 5, 6, 7, 8, 0]], np.int32)
  run = run_of(model, ids, encode=lambda text, length: ids[0, :7])
  rows = measured.Rows(measured.Options())
  rows.add_tokens("run", run)
  noun = "head" if name == "transformer" else "expert"
  distances = {row[:3]: row[3] for row in rows.of["head_pairs"]}
  pairs = {row[1] for row in rows.of["pairs"]}
  assert len(pairs) == measured.MOST_PAIRS
  # Two pairs, two heads, two layers.
  assert len(distances) == 8
  captured = capture(model, make_variables(model, run.params), ids[:, :7])
  of_parts = parts(model, make_variables(model, run.params), captured)
  (title, part, layer), distance = list(distances.items())[-1]
  first, second = (
    WORDS.index(word) - 2 for word in title.removeprefix("run, ").split(" - ")
  )
  assert (part, layer) == (f"{noun} 2", 2)
  head = of_parts[1][0, 1]
  want = np.linalg.norm(head[first] - head[second])
  assert distance == pytest.approx(want, rel=1e-4)


def test_entropy_table_has_means_deviations_and_the_paper():
  """Mean over layers, mean and deviation over samples, and the paper's."""
  config = {"seed": 0, "task": {"name": "imdb"}, "model": {"name": "transject"}}
  groups = group_by_recipe([RunRecord(Path("run"), config, {})])
  rows = measured.Rows(measured.Options())
  assert not measured._entropy_table(groups, rows)
  label = groups[0].label
  values = {(1, 0): 1.0, (2, 0): 3.0, (1, 1): 3.0, (2, 1): 5.0}
  rows.of["entropy"] = [
    *((label, 0, layer, sample, v) for (layer, sample), v in values.items()),
    *((label, 0, 0, sample, 100.0) for sample in (0, 1)),
    (f"{label}, untrained", 0, 1, 0, 7.0),
  ]
  rows.of["shape"] = [(*row[:4], 1.25) for row in rows.of["entropy"]]
  rows.of["parts"] = [
    (label, 0, 1, part, 0, value) for part, value in ((0, -1.0), (1, -2.0))
  ]
  *_, trained_line, start = measured._entropy_table(groups, rows).split("\n")
  assert trained_line == (
    f"| {label} | 3.00 +- 1.41 | 1.25 +- 0.00 | -1.3 +- 0.12 | -1.50 | -2.2 |"
  )
  assert start == f"| {label}, untrained | 7.00 | 1.25 |  |  |  |"
