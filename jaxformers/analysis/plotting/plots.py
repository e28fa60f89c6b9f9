"""Kinds of figures, each with the format of its rows and its drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformers.analysis.plotting import figures
from jaxformers.analysis.plotting.figures import Figure, Row, Texts, grouped

# Ratio of largest to smallest value above which an axis is logarithmic.
WIDE_RANGE = 5
NUM_BINS = 40
MOST_TICKS = 13
MOST_NAMED = 24  # Largest number of tokens named along an axis of a map.
MOST_LAYERS = 4  # Largest number of layers drawn next to each other.


def over_layers(
  texts: Texts,
  rows: Sequence[Row],
  quantity: str,
  *,
  lines: Sequence[tuple[float, str]] = (),
  ratio: bool = False,
  x: str = "layer (0: embedding)",
  sample: str = "sample",
  whiskers: tuple[float, float] = figures.WHISKERS,
) -> Figure:
  """Returns the figure of a quantity, with boxes over samples for each layer.

  Args:
    texts: texts of the figure.
    rows: (run, seed, layer, sample, value).
    quantity: label of the axis, with its unit.
    lines: values to mark by horizontal lines, with their labels.
    ratio: True to use a logarithmic axis if the values differ much.
    x: label of the horizontal axis.
    sample: name of the column of samples in the table.
    whiskers: percentiles at which the whiskers of a box end.
  """

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes = fig.subplots()
    figures.draw_boxes(axes, _values_by(rows, 0, 2), whiskers)
    # Mark values by horizontal lines.
    for k, (value, label) in enumerate(lines):
      dash = figures.DASHES[1 + k % 3]
      axes.axhline(value, color="0.3", linestyle=dash, lw=1, label=label)
    axes.set(xlabel=x, ylabel=quantity)
    # Use a logarithmic axis for ratios that differ much.
    finite = [row[-1] for row in rows if math.isfinite(row[-1])]
    if ratio and finite and max(finite) > WIDE_RANGE * min(finite) > 0:
      axes.set_yscale("log")
      axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      axes.yaxis.set_major_formatter("{x:g}")
      axes.yaxis.set_minor_locator(NullLocator())
    figures.draw_legend(fig, axes)

  columns = ("run", "seed", "layer", sample, quantity)
  return Figure(*texts, columns, rows, paint)


def _values_by(
  rows: Iterable[Row], label: int, category: int
) -> dict[Any, dict[Any, list[float]]]:
  """Returns the values of the last column, grouped by two other columns.

  Args:
    rows: rows of a table.
    label, category: indices of the columns to group by.
  """
  return {
    key: {
      place: [row[-1] for row in at]
      for place, at in grouped(of_label, category).items()
    }
    for key, of_label in grouped(rows, label).items()
  }


def parts(texts: Texts, rows: Sequence[Row]) -> Figure:
  """Returns the figure of entropies of heads and experts, a panel per run.

  Args:
    texts: texts of the figure.
    rows: (run, seed, layer, part, sample, entropy).
  """

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    panels = _panels(fig, rows)
    for panel, run_rows in panels:
      # Draw a box for every head or expert at each layer.
      by_part = _values_by(run_rows, 3, 2)
      figures.draw_boxes(panel, {f"{k + 1}": v for k, v in by_part.items()})
      panel.set_xlabel("layer")
    panels[0][0].set_ylabel("entropy, nats")
    axes = (panel for panel, _ in panels)
    figures.draw_legend(fig, *axes, title="head or expert", cols=8)

  columns = ("run", "seed", "layer", "part", "sample", "entropy, nats")
  return Figure(*texts, columns, rows, paint, _panel_size(rows, 3.4))


def _panels(fig: Any, rows: Iterable[Row]) -> list[tuple[Any, list[Row]]]:
  """Returns a titled panel for each run, with the rows of the run."""
  by_run = grouped(rows)
  panels = fig.subplots(1, len(by_run), squeeze=False, sharey=True)[0]
  for panel, run in zip(panels, by_run, strict=True):
    panel.set_title(run)
  return list(zip(panels, by_run.values(), strict=True))


def _panel_size(rows: Iterable[Row], height: float) -> tuple[float, float]:
  """Returns the size of a figure with a panel for each run."""
  return max(3.2 * len(grouped(rows)), 4.8), height


def curves(
  texts: Texts,
  rows: Sequence[Row],
  x: str,
  panels: Mapping[str, str],
  *,
  markers: bool = True,
  log: str = "",
) -> Figure:
  """Returns the figure of several quantities over x, with bands over seeds.

  Args:
    texts: texts of the figure.
    rows: (run, seed, quantity, x, value).
    x: label of the horizontal axis, such as "step".
    panels: label of the vertical axis for each quantity.
    markers: True to mark all points, even if there are many.
    log: axes with a logarithmic scale: "", "x", "y" or "xy".
  """
  by_quantity = grouped(rows, 2)
  drawn = [key for key in panels if key in by_quantity]
  # Arrange four panels in a square, and other numbers in rows of three.
  num_columns = 2 if len(drawn) == 4 else min(len(drawn), 3) or 1
  num_rows = -(-len(drawn) // num_columns) or 1

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    axes = fig.subplots(num_rows, num_columns, squeeze=False).ravel()
    for unused in axes[len(drawn) :]:
      unused.remove()
    # Draw a panel for each quantity.
    for panel, key in zip(axes, drawn, strict=False):
      by_run = grouped(by_quantity[key])
      # A run has the same style in all panels.
      for number, run in enumerate(grouped(rows)):
        if run in by_run:
          points = figures.averaged(by_run[run], 3, 4)
          figures.draw_line(panel, points, number, run, markers=markers)
      panel.set(xlabel=x, ylabel=panels[key])
      if "y" in log:
        panel.set_yscale("log")
      if "x" in log:
        panel.set_xscale("log", base=2)
        continue
      places = sorted({row[3] for row in by_quantity[key]})
      # Marked steps have few places: put the ticks there.
      if markers and all(float(place).is_integer() for place in places):
        panel.set_xticks(figures.evenly_spaced(places, MOST_TICKS))
        if len(places) == 1:
          panel.set_xlim(places[0] - 1, places[0] + 1)
    figures.draw_legend(fig, *axes[: len(drawn)])

  columns = ("run", "seed", "quantity", x, "value")
  width = 3.4 * num_columns if num_columns > 1 else 6.4
  return Figure(*texts, columns, rows, paint, (width, 2.9 * num_rows + 0.4))


def histogram(texts: Texts, rows: Sequence[Row], quantity: str) -> Figure:
  """Returns the figure of expert weights, a panel per run, a line per layer.

  A dotted line marks the equal weight 1 / E.

  Args:
    texts: texts of the figure.
    rows: (run, seed, layer, sample, expert, value).
    quantity: label of the axis.
  """

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    panels = _panels(fig, rows)
    # Experts are numbered from 0: E is the largest number plus 1.
    equal = [1 / (1 + max(row[4] for row in of_run)) for _, of_run in panels]
    # Use the same bins in all panels, so that panels can be compared.
    edges = _bin_edges([row[5] for row in rows], equal)
    for (panel, run_rows), weight in zip(panels, equal, strict=True):
      by_layer = grouped(run_rows, 2)
      for number, (layer, layer_rows) in enumerate(by_layer.items()):
        look = {k: figures.style(number)[k] for k in ("color", "linestyle")}
        values = [row[5] for row in layer_rows]
        shares = np.full(len(values), 100 / len(values))
        step = {"histtype": "step", "linewidth": 1.5, **look}
        panel.hist(values, edges, weights=shares, **step)
        # Add an empty line, so that the legend shows lines, not rectangles.
        panel.plot([], [], label=f"layer {layer}", **look)
      panel.axvline(weight, color="0.3", lw=1, linestyle=":")
      panel.set_xlabel(quantity)
    panels[0][0].set_ylabel("share of samples and experts, %")
    figures.draw_legend(fig, *(panel for panel, _ in panels))

  columns = ("run", "seed", "layer", "sample", "expert", quantity)
  return Figure(*texts, columns, rows, paint, _panel_size(rows, 3.2))


def _bin_edges(values: Sequence[float], marked: Sequence[float]) -> np.ndarray:
  """Returns edges of bins, with the first marked value centred in a bin."""
  low, high = min(*values, *marked), max(*values, *marked)
  pad = max(0.05 * (high - low), 0.02)
  width = (high - low + 2 * pad) / NUM_BINS
  # Shift the edges by half a width, which centres the marked value.
  first = math.floor((low - pad - marked[0]) / width) - 0.5
  count = math.ceil((high + pad - marked[0]) / width - first) + 1
  return marked[0] + width * (first + np.arange(count + 1))


def pairs(texts: Texts, rows: Sequence[Row]) -> Figure:
  """Returns the figure of distances of token pairs over layers, a row per run.

  Args:
    texts: texts of the figure.
    rows: (run, pair, layer, euclidean, cosine).
  """
  by_run = grouped(rows)
  titles = ("Euclidean distance", "1 - cosine")

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    panels = fig.subplots(len(by_run), 2, squeeze=False, sharex="row")
    # Draw both distances of a run next to each other, a line for each pair.
    for row, (run, run_rows) in zip(panels, grouped(rows).items(), strict=True):
      by_pair = grouped(run_rows, 1)
      for k, (axes, distance) in enumerate(zip(row, titles, strict=True)):
        for number, (pair, pair_rows) in enumerate(by_pair.items()):
          x, y = ([r[column] for r in pair_rows] for column in (2, 3 + k))
          axes.plot(x, y, label=figures.literal(pair), **figures.style(number))
        # Begin the axis at 0; end it at 1 if all distances are 0.
        axes.set_ylim(0, 1.1 * max(r[3 + k] for r in run_rows) or 1)
        axes.set(xlabel="layer (0: embedding)", ylabel=distance, title=run)
        axes.xaxis.get_major_locator().set_params(integer=True)
      # Draw a legend for every run, since runs may have different tokens.
      row[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))

  columns = ("run", "pair", "layer", *titles)
  size = (8.2, 2.5 * len(by_run) + 0.5)
  return Figure(*texts, columns, rows, paint, size)


def _drawn_layers(rows: Iterable[Row]) -> dict[Any, dict[Any, list[Row]]]:
  """Returns the rows of evenly spaced layers, grouped by run and layer.

  Args:
    rows: (run, layer, ...).
  """
  drawn = {}
  for run, run_rows in grouped(rows).items():
    by_layer = grouped(run_rows, 1)
    layers = figures.evenly_spaced(sorted(by_layer), MOST_LAYERS)
    drawn[run] = {layer: by_layer[layer] for layer in layers}
  return drawn


def _grid(
  fig: Any, rows: Iterable[Row]
) -> Iterator[tuple[Any, list[tuple[Any, Any, list[Row]]]]]:
  """Yields each run with the (layer, axes, rows) of its drawn layers.

  Args:
    fig: figure of matplotlib, to which a row of panels is added for each run.
    rows: (run, layer, ...).
  """
  drawn = _drawn_layers(rows)
  panels = fig.subplots(len(drawn), _num_columns(drawn), squeeze=False)
  for across, (run, layers) in zip(panels, drawn.items(), strict=True):
    # Remove the panels of layers that a shallower run does not have.
    for unused in across[len(layers) :]:
      unused.remove()
    yield run, list(zip(layers, across, layers.values(), strict=False))


def _num_columns(drawn: Mapping[Any, Mapping[Any, Any]]) -> int:
  """Returns the largest number of drawn layers of a run."""
  return max(map(len, drawn.values()), default=1)


def planes(texts: Texts, rows: Sequence[Row]) -> Figure:
  """Returns the figure of tokens in a plane, a row per run, a column per layer.

  Args:
    texts: texts of the figure.
    rows: (run, layer, place, token, named, x, y). Tokens with `named` = 1 are
      listed in the legend.
  """
  drawn = _drawn_layers(rows)

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    for run, layers in _grid(fig, rows):
      # Read the named tokens from the first layer; all layers name the same.
      names = {row[2]: row[3] for row in layers[0][2] if row[4]}
      for layer, axes, points in layers:
        # Scale each panel separately; the title states its width.
        reach = max(max(abs(p[5]), abs(p[6])) for p in points) or 1
        axes.grid(visible=False)
        limits = (-1.1 * reach, 1.1 * reach)
        axes.set(xticks=[], yticks=[], aspect="equal", xlim=limits, ylim=limits)
        place = f"layer {layer}" if layer else "embedding"
        axes.set_title(f"{run}\n{place}, width {2.2 * reach:.3g}")
        x, y = ([p[k] for p in points] for k in (5, 6))
        axes.plot(x, y, "o", color="0.75", ms=3)
        # Draw the named tokens over the others.
        by_place = {p[2]: p for p in points}
        for number, (token_place, token) in enumerate(names.items()):
          if point := by_place.get(token_place):
            look = figures.style(number) | {"linestyle": "", "markersize": 6}
            axes.plot(*point[5:], label=figures.literal(token), **look)
      # Draw a legend for every run, since runs may have different tokens.
      layers[-1][1].legend(loc="center left", bbox_to_anchor=(1, 0.5))

  columns = ("run", "layer", "place", "token", "named", "x", "y")
  size = (2.2 * _num_columns(drawn) + 1.2, 2.6 * len(drawn) + 0.4)
  return Figure(*texts, columns, rows, paint, size)


def maps(texts: Texts, rows: Sequence[Row]) -> Figure:
  """Returns the figure of attention matrices: rows are runs, columns layers.

  Args:
    texts: texts of the figure.
    rows: (run, layer, query, key, token of the query, token of the key,
      weight).
  """
  drawn = _drawn_layers(rows)

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    for run, layers in _grid(fig, rows):
      for layer, axes, weights in layers:
        axes.grid(visible=False)
        # Build the matrix [queries, keys] from its rows.
        _, _, queries, keys, *_, values = zip(*weights, strict=True)
        image = np.zeros((1 + max(queries), 1 + max(keys)))
        image[queries, keys] = values
        shown = axes.imshow(image, cmap="cividis", vmin=0)
        fig.colorbar(shown, ax=axes, shrink=0.7)
        axes.set(xlabel="key", title=f"{run}\nlayer {layer}")
        _name_ticks(axes, weights)
      layers[0][1].set_ylabel("query")

  columns: tuple[str, ...]
  columns = ("run", "layer", "query", "key", "query token", "key token")
  columns += ("attention weight",)
  size = (2.5 * _num_columns(drawn), 2.6 * len(drawn) + 0.4)
  return Figure(*texts, columns, rows, paint, size)


def scores(texts: Texts, rows: Sequence[Row]) -> Figure:
  """Returns the figure of percentages as a matrix of colours and numbers.

  Args:
    texts: texts of the figure.
    rows: (row, column, percentage); pairs without one stay empty.
  """
  names = list(dict.fromkeys(row[0] for row in rows))
  titles = list(dict.fromkeys(row[1] for row in rows))

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    axes = fig.subplots()
    axes.grid(visible=False)
    image = np.full((len(names), len(titles)), np.nan)
    for name, title, value in rows:
      image[names.index(name), titles.index(title)] = value
    shown = axes.imshow(image, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    fig.colorbar(shown, ax=axes, shrink=0.5, label="%")
    for (row, column), value in np.ndenumerate(image):
      if np.isfinite(value):
        color = "black" if value > 50 else "white"
        place = {"ha": "center", "va": "center", "fontsize": 6}
        axes.text(column, row, f"{value:.0f}", color=color, **place)
    axes.set_xticks(range(len(titles)), titles, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.tick_params(length=0)

  size = (0.45 * len(titles) + 3.2, 0.2 * len(names) + 1.4)
  return Figure(*texts, ("row", "column", "percentage"), rows, paint, size)


def _name_ticks(axes: Any, rows: Sequence[Row]) -> None:
  """Names the tokens along both axes of a map, or every k-th token.

  Args:
    axes: axes of matplotlib.
    rows: rows of one map, in the format of `maps`.
  """
  queries = {row[2]: figures.literal(row[4]) for row in rows}
  keys = {row[3]: figures.literal(row[5]) for row in rows}
  style = {"fontsize": 5}
  for names, set_ticks, more in (
    (keys, axes.set_xticks, {"rotation": 90}),
    (queries, axes.set_yticks, {}),
  ):
    # Name at most `MOST_NAMED` tokens.
    shown = sorted(names)[:: -(-len(names) // MOST_NAMED)]
    set_ticks(shown, [names[place] for place in shown], **style, **more)
    axes.tick_params(length=0, pad=1)


def against(
  texts: Texts, rows: Sequence[Row], axes_of: Mapping[str, str], quantity: str
) -> Figure:
  """Returns the figure of a score over sizes of the model, a panel per size.

  Args:
    texts: texts of the figure.
    rows: (model, seed, size, value, score).
    axes_of: label of the horizontal axis for each size.
    quantity: label of the score, with its unit.
  """

  by_size = grouped(rows, 2)

  def paint(fig: Any, rows: Sequence[Row]) -> None:
    drawn = [size for size in axes_of if size in by_size]
    panels = fig.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    for panel, size in zip(panels, drawn, strict=True):
      by_model = grouped(by_size[size])
      # A model has the same style in all panels.
      for number, model in enumerate(grouped(rows)):
        if model in by_model:
          points = figures.averaged(by_model[model], 3, 4)
          figures.draw_error_bars(panel, points, number, model)
      panel.set_xlabel(axes_of[size])
      panel.set_xticks(sorted({row[3] for row in by_size[size]}))
    panels[0].set_ylabel(quantity)
    figures.draw_legend(fig, *panels)

  columns = ("model", "seed", "size", "value", quantity)
  size = (max(2.6 * len(by_size), 4.8), 3.2)
  return Figure(*texts, columns, rows, paint, size)
