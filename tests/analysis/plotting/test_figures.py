"""Parts of all figures: colours, boxes, means."""

import math

import pytest

from jaxformers.analysis.plotting import figures as f


def test_draw_boxes_has_quartiles_of_finite_values():
  from matplotlib.figure import Figure

  axes = Figure().subplots()
  values = [1.0, 2.0, 3.0, 4.0, 5.0, math.nan, math.inf]
  f.draw_boxes(axes, {"one": {0: values, 1: [math.nan]}, "two": {1: [7.0]}})
  (box, _) = axes.patches
  heights = box.get_path().vertices[:, 1]
  assert (heights.min(), heights.max()) == (2, 4)
  assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "1"]


def test_draw_boxes_sorts_layers_of_runs_of_different_depth():
  from matplotlib.figure import Figure

  axes = Figure().subplots()
  layers = {"short": ("1", "2", "all"), "deep": ("1", "2", "3", "10", "all")}
  groups = {k: {name: [1.0] for name in v} for k, v in layers.items()}
  f.draw_boxes(axes, groups)
  shown = [tick.get_text() for tick in axes.get_xticklabels()]
  assert shown == ["1", "2", "3", "10", "all"]


def test_style_differs_in_more_than_colour():
  seen = {tuple(sorted(f.style(k).items())) for k in range(12)}
  assert len(seen) == 12
  assert f.evenly_spaced(range(10), 4) == [0, 3, 6, 9]
  assert f.evenly_spaced([5], 4) == [5]


def test_describe_data_gives_samples_lengths_and_seeds():
  single = f.describe_data([8], [200], [1])
  assert single == "8 test samples of at most 200 tokens, 1 seed"
  several = f.describe_data([13, 8], [200, 50, 200], [3, 1])
  assert (
    several == "8 or 13 test samples of at most 50 or 200 tokens, 1 to 3 seeds"
  )


def test_finite_spread_ignores_missing_values():
  assert f.finite_spread([2.0, None, math.nan]) == (
    2.0,
    pytest.approx(math.nan, nan_ok=True),
  )
  assert all(math.isnan(v) for v in f.finite_spread([]))
