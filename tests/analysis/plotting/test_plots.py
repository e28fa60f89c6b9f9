"""Every kind of figure, as data and as a picture."""

import csv
import io
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jaxformers.analysis.plotting import plots as p
from jaxformers.analysis.plotting.figures import Texts
from tests.marks import slow_except

TEXTS = Texts("n", "t", "c")


def lines(runs=("one", "two"), seeds=(0, 1), panels=("a", "b")):
  rng = np.random.default_rng(0)
  return [
    (run, seed, panel, x, float(rng.uniform(1, 2)))
    for run in runs
    for seed in seeds
    for panel in panels
    for x in range(4)
  ]


def boxed():
  rng = np.random.default_rng(0)
  rows = [
    (run, 0, layer, k, float(rng.normal()))
    for run in ("one", "two", "three")
    for layer in range(3)
    for k in range(9)
  ]
  return [*rows, ("two", 0, 1, 9, math.nan)]


def shares():
  return [
    (run, 0, layer, k, e, 0.25)
    for run in ("one", "two")
    for layer in (1, 2)
    for k in range(3)
    for e in range(4)
  ]


def points():
  return [
    (run, layer, k, f"t{k}", k < 2, float(k), float(layer * k))
    for run in ("one", "two")
    for layer in range(6)
    for k in range(5)
  ]


EVERY = {
  "curves": lambda: p.curves(TEXTS, lines(), "step", {"a": "A", "b": "B"}),
  "over_layers": lambda: p.over_layers(
    TEXTS, boxed(), "factor", lines=((1.0, "kept"),)
  ),
  "histogram": lambda: p.histogram(TEXTS, shares(), "w"),
  "pairs": lambda: p.pairs(
    TEXTS,
    [(r, p, k, 1.0 + k, 0.1) for r in "xy" for p in "ab" for k in range(3)],
  ),
  "planes": lambda: p.planes(TEXTS, points()),
  "maps": lambda: p.maps(
    TEXTS,
    [
      (r, 1, i, j, f"q{i}", f"k{j}", 0.5)
      for r in "xy"
      for i in range(3)
      for j in range(3)
    ],
  ),
  "against": lambda: p.against(
    TEXTS,
    [("m", s, "L", k, 50.0 + s + k) for s in (0, 1) for k in (2, 4)],
    {"L": "layers", "d": "width"},
    "accuracy %",
  ),
}


@pytest.mark.parametrize("kind", slow_except(("pairs",), sorted(EVERY)))
@pytest.mark.slow
def test_every_figure_writes_csv_png_and_svg(kind, tmp_path):
  figure = EVERY[kind]()
  paths = figure.write(tmp_path / "deep" / "folder")
  assert [path.suffix for path in paths] == [".csv", ".png", ".svg"]
  rows = list(csv.reader(io.StringIO(paths[0].read_text())))
  assert tuple(rows[0]) == figure.columns
  assert len(rows) == 1 + len(figure.rows)
  assert {len(row) for row in rows} == {len(figure.columns)}
  assert paths[1].read_bytes().startswith(b"\x89PNG")
  ET.fromstring(paths[2].read_bytes())
  # The same again, to the byte: a page can be compared with an older one.
  assert figure.picture("svg") == paths[2].read_bytes()


def drawn(figure):
  """matplotlib's axes after drawing."""
  from matplotlib.figure import Figure

  canvas = Figure()
  figure.paint(canvas, figure.rows)
  return canvas


def test_curves_draw_means_with_bands_of_a_deviation():
  rows = [
    ("one", s, "a", x, v) for s, v in ((0, 1.0), (1, 3.0)) for x in (0, 1)
  ]
  (axes,) = drawn(p.curves(TEXTS, rows, "x", {"a": "A"})).axes
  np.testing.assert_allclose(axes.lines[0].get_ydata(), [2, 2])
  (band,) = axes.collections
  edges = band.get_paths()[0].vertices[:, 1]
  half = math.sqrt(2)
  assert edges.min() == pytest.approx(2 - half)
  assert edges.max() == pytest.approx(2 + half)
  assert axes.get_ylabel() == "A"


def test_over_layers_draws_wide_ratios_on_a_logarithmic_axis():
  def scale(greatest, **options):
    rows = [("one", 0, 0, k, v) for k, v in enumerate((1.0, greatest))]
    figure = p.over_layers(TEXTS, rows, "q", **options)
    return drawn(figure).axes[0].get_yscale()

  assert scale(20.0, ratio=True) == "log"
  assert scale(20.0) == scale(1.2, ratio=True) == "linear"


def test_curves_of_one_seed_have_no_band():
  rows = lines(seeds=(3,))
  assert not drawn(p.curves(TEXTS, rows, "x", {"a": "A"})).axes[0].collections


@pytest.mark.parametrize(
  ("places", "ticks"), [((0, 5, 9), [0, 5, 9]), ((1.31, 1.47, 9.83), None)]
)
def test_curves_put_ticks_only_at_whole_places(places, ticks):
  rows = [("one", 0, "a", x, 1.0) for x in places]
  (axes,) = drawn(p.curves(TEXTS, rows, "minutes", {"a": "A"})).axes
  if ticks:
    assert axes.get_xticks().tolist() == ticks
  else:  # Labels of places that are close to each other would overlap.
    assert not {*axes.get_xticks()} & {*places}


def test_curves_legend_names_lines_of_all_panels():
  rows = [("one", 0, "a", 0, 1.0), ("two", 0, "b", 0, 1.0)]
  canvas = drawn(p.curves(TEXTS, rows, "x", {"a": "A", "b": "B"}))
  (legend,) = canvas.legends
  assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_pairs_figure_draws_labels_with_dollar_signs_as_text():
  rows = [("run", r"$\x - y$", k, 1.0, 0.1) for k in range(2)]
  rows += [("run", "_a - b", k, 1.0, 0.1) for k in range(2)]
  figure = p.pairs(TEXTS, rows)
  assert figure.picture("png")
  (legend,) = (axes.get_legend() for axes in drawn(figure).axes[1:])
  assert len(legend.get_texts()) == 2


def long(rows):
  """Rows of runs with names as long as reports have."""
  name = "transformer, d_model=64, mlp_dim=256, learning_rate=0.0005, run"
  return [(f"{name} {row[0]}", *row[1:]) for row in rows]


QUANTITY = "a quantity with a name that is longer than its axis is high, nats"
PARTS = [(r, 0, k, e, 0, 1.0 * k) for r in "xy" for k in (1, 2) for e in (0, 1)]
PAIRS = [(r, "un(believable) - in(comprehensible)", 0, 1.0, 0.1) for r in "xy"]
MAPS = [
  (r, k, 0, i, "incomprehensible", "unbelievable", 0.5)
  for r in "xy"
  for k in range(4)
  for i in range(3)
]
LONG = {
  "curves": lambda: p.curves(
    TEXTS, long(lines()), QUANTITY, {"a": QUANTITY, "b": QUANTITY}
  ),
  "over_layers": lambda: p.over_layers(TEXTS, long(boxed()), QUANTITY),
  "parts": lambda: p.parts(TEXTS, long(PARTS)),
  "histogram": lambda: p.histogram(TEXTS, long(shares()), QUANTITY),
  "pairs": lambda: p.pairs(TEXTS, long(PAIRS)),
  "planes": lambda: p.planes(TEXTS, long(points())),
  "maps": lambda: p.maps(TEXTS, long(MAPS)),
  "against": lambda: p.against(
    TEXTS, long([("m", 0, "L", 2, 50.0)]), {"L": QUANTITY}, QUANTITY
  ),
}


@pytest.mark.parametrize("kind", sorted(LONG))
@pytest.mark.slow
def test_every_figure_clips_no_label(kind):
  """None passes the edge of the picture, or the length of its axis."""
  canvas = LONG[kind]().draw()
  box = canvas.get_tightbbox()
  width, height = canvas.get_size_inches()
  assert min(box.x0, box.y0) >= 0
  assert box.x1 <= width
  assert box.y1 <= height
  for axes in canvas.axes:
    room = axes.get_window_extent()
    for label in (axes.title, axes.xaxis.label):
      assert label.get_window_extent().width <= 1.02 * room.width
    label = axes.yaxis.label
    assert label.get_window_extent().height <= 1.02 * room.height


def test_maps_have_tokens_on_their_axes():
  """All of a few, and every k-th of many."""
  rows = [
    ("x", 1, i, j, f"q{i}", f"$k_{j}", 0.5) for i in range(3) for j in range(60)
  ]
  axes = drawn(p.maps(TEXTS, rows)).axes[0]
  assert [t.get_text() for t in axes.get_yticklabels()] == ["q0", "q1", "q2"]
  assert axes.get_xticks().tolist() == [*range(0, 60, 3)]
  assert axes.get_xticklabels()[1].get_text() == r"\$k_3"


def test_curves_mark_a_single_point_with_value_and_error_bar():
  rows = [("one", s, "a", 2, v) for s, v in ((0, 1.0), (1, 3.0))]
  rows += [("two", 0, "a", 2, 5.25)]
  # Of a long curve with one number, too.
  rows += [("three", 0, "a", x, 4.0 if x == 9 else math.nan) for x in range(50)]
  figure = p.curves(TEXTS, rows, "x", {"a": "A"}, markers=False)
  (axes,) = drawn(figure).axes
  assert [text.get_text() for text in axes.texts] == ["2", "5.25", "4"]
  marked = [line for line in axes.lines if line.get_label()[0] != "_"]
  assert [line.get_marker() for line in marked] == ["o", "s", "^"]
  (bar,) = axes.containers
  (segment,) = bar.lines[2][0].get_segments()
  np.testing.assert_allclose(segment[:, 1], [2 - 2**0.5, 2 + 2**0.5])
