"""The kinds of figures: rows of a form, and how that form is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformers.analysis.plotting.figures import (
  DASHES,
  Figure,
  Row,
  averaged,
  boxes,
  error_bars,
  grouped,
  legend,
  line,
  literal,
  some,
  style,
)

MUCH = 5  # Times the least that the greatest is, on a logarithmic axis.


def over_layers(
  name: str,
  title: str,
  caption: str,
  rows: Sequence[Row],
  quantity: str,
  *,
  lines: tuple[tuple[float, str], ...] = (),
  ratio: bool = False,
) -> Figure:
  """Boxes of a quantity over samples, layer by layer.

  Args:
    name, title, caption: of the figure.
    rows: (run, seed, layer, sample, value).
    quantity: on the axis, with its unit.
    lines: values to mark, with what they are.
    ratio: whether the axis is logarithmic where values differ much.
  """

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes = canvas.subplots()
    groups: dict[str, dict[Any, list[float]]] = {}
    for run, _, layer, _, value in rows:
      groups.setdefault(run, {}).setdefault(layer, []).append(value)
    boxes(axes, groups)
    for k, (value, meaning) in enumerate(lines):
      axes.axhline(
        value, color="0.3", linestyle=DASHES[1 + k % 3], lw=1, label=meaning
      )
    axes.set_xlabel("layer (0: embedding)")
    axes.set_ylabel(quantity)
    known = [row[-1] for row in rows if math.isfinite(row[-1])]
    if ratio and known and max(known) > MUCH * min(known) > 0:
      axes.set_yscale("log")
      axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      axes.yaxis.set_major_formatter("{x:g}")
      axes.yaxis.set_minor_locator(NullLocator())
    legend(canvas, axes)

  columns = ("run", "seed", "layer", "sample", quantity)
  return Figure(name, title, caption, columns, rows, paint)


def parts(name: str, title: str, caption: str, rows: Sequence[Row]) -> Figure:
  """Boxes of the entropies of heads and experts, a panel a run.

  Args:
    name, title, caption: of the figure.
    rows: (run, seed, layer, part, sample, entropy).
  """
  runs = grouped(rows)

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for panel, (run, own) in zip(panels, grouped(rows).items(), strict=True):
      by: dict[str, dict[Any, list[float]]] = {}
      for _, _, layer, part, _, value in own:
        by.setdefault(f"{part + 1}", {}).setdefault(layer, []).append(value)
      boxes(panel, by)
      panel.set_title(run)
      panel.set_xlabel("layer")
    panels[0].set_ylabel("entropy, nats")
    legend(canvas, *panels, title="head or expert", columns=8)

  columns = ("run", "seed", "layer", "part", "sample", "entropy, nats")
  size = (max(3.2 * len(runs), 4.8), 3.4)
  return Figure(name, title, caption, columns, rows, paint, size)


def curves(
  name: str,
  title: str,
  caption: str,
  rows: Sequence[Row],
  x: str,
  panels: Mapping[str, str],
  *,
  markers: bool = True,
) -> Figure:
  """Lines of several quantities over steps or layers, with bands over seeds.

  Args:
    name, title, caption: of the figure.
    rows: (run, seed, quantity, x, value).
    x: what is on the axis.
    panels: of every quantity, what is on its axis.
    markers: whether points are marked, however many.
  """
  there = [key for key in panels if any(row[2] == key for row in rows)]
  width = 2 if len(there) == 4 else min(len(there), 3) or 1
  height = -(-len(there) // width) or 1

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots(height, width, squeeze=False).ravel()
    for unused in axes[len(there) :]:
      unused.remove()
    for panel, key in zip(axes, there, strict=False):
      own = [row for row in rows if row[2] == key]
      for number, run in enumerate(grouped(rows)):
        found = averaged([row for row in own if row[0] == run], 3, 4)
        if not found[0]:
          continue
        line(panel, *found, number, run, markers=markers)
      panel.set_xlabel(x)
      panel.set_ylabel(panels[key])
      if markers:  # A few places, each of which is there or not.
        places = sorted({row[3] for row in own})
        panel.set_xticks(some(places, 13))
        if len(places) == 1:
          panel.set_xlim(places[0] - 1, places[0] + 1)
    legend(canvas, *axes[: len(there)])

  columns = ("run", "seed", "quantity", x, "value")
  size = (3.4 * width if width > 1 else 6.4, 2.9 * height + 0.4)
  return Figure(name, title, caption, columns, rows, paint, size)


def histogram(
  name: str,
  title: str,
  caption: str,
  rows: Sequence[Row],
  quantity: str,
) -> Figure:
  """Distributions of a share, a panel a run, a line a layer; 1 / E is marked.

  Args:
    name, title, caption: of the figure.
    rows: (run, seed, layer, sample, expert, value).
    quantity: on the axis.
  """
  runs = list(grouped(rows))

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    values = np.array([row[5] for row in rows], float)
    equal = {
      run: 1 / (1 + max(row[4] for row in own))
      for run, own in grouped(rows).items()
    }
    low = min(values.min(), *equal.values())
    high = max(values.max(), *equal.values())
    marked = next(iter(equal.values()))
    pad = max(0.05 * (high - low), 0.02)
    # What is marked first is in the middle of a bin.
    width = (high - low + 2 * pad) / 40
    first = math.floor((low - pad - marked) / width) - 0.5
    count = math.ceil((high + pad - marked) / width - first) + 1
    edges = marked + width * (first + np.arange(count + 1))
    for panel, run in zip(panels, runs, strict=True):
      layers = grouped([row for row in rows if row[0] == run], 2)
      for number, (layer, own) in enumerate(layers.items()):
        how = style(number)
        del how["marker"]
        weights = np.full(len(own), 100 / len(own))
        panel.hist(
          [row[5] for row in own],
          edges,
          weights=weights,
          histtype="step",
          color=how["color"],
          linestyle=how["linestyle"],
          linewidth=1.5,
        )
        panel.plot(
          [],
          [],
          color=how["color"],
          linestyle=how["linestyle"],
          label=f"layer {layer}",
        )
      panel.axvline(equal[run], color="0.3", lw=1, linestyle=":")
      panel.set_title(run)
      panel.set_xlabel(quantity)
    panels[0].set_ylabel("share of samples and experts, %")
    legend(canvas, *panels)

  columns = ("run", "seed", "layer", "sample", "expert", quantity)
  size = (max(3.2 * len(runs), 4.8), 3.2)
  return Figure(name, title, caption, columns, rows, paint, size)


def pairs(name: str, title: str, caption: str, rows: Sequence[Row]) -> Figure:
  """Distances of chosen pairs of tokens over layers, a row a run.

  Args:
    name, title, caption: of the figure.
    rows: (run, pair, layer, euclidean, cosine).
  """
  runs = list(grouped(rows))

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(len(runs), 2, squeeze=False, sharex="row")
    for row, run in zip(panels, runs, strict=True):
      of = grouped([r for r in rows if r[0] == run], 1)
      for k, (axes, what) in enumerate(
        zip(row, ("Euclidean distance", "1 - cosine"), strict=True)
      ):
        for number, (pair, own) in enumerate(of.items()):
          axes.plot(
            [r[2] for r in own],
            [r[3 + k] for r in own],
            label=literal(pair),
            **style(number),
          )
        most = max(r[3 + k] for r in rows if r[0] == run)
        axes.set_ylim(0, 1.1 * most or 1)
        axes.set_ylabel(what)
        axes.set_xlabel("layer (0: embedding)")
        axes.set_title(run)
        axes.xaxis.get_major_locator().set_params(integer=True)
      # Runs may have other tokens.
      row[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))

  columns = ("run", "pair", "layer", "Euclidean distance", "1 - cosine")
  size = (8.2, 2.5 * len(runs) + 0.5)
  return Figure(name, title, caption, columns, rows, paint, size)


def _drawn(rows: Iterable[Row]) -> dict[Any, list[Any]]:
  """Layers of every run that are drawn: the first, the last, some between."""
  return {
    run: some(sorted(grouped(own, 1)), 4) for run, own in grouped(rows).items()
  }


def _grid(
  canvas: Any, rows: Iterable[Row], drawn: Mapping[Any, Sequence[Any]]
) -> Iterator[tuple[Any, list[tuple[Any, Any, list[Row]]]]]:
  """Of every run (layer, axes, rows) for the drawn layers, a row a run."""
  by = grouped(rows)
  widest = max(map(len, drawn.values()), default=1)
  panels = canvas.subplots(len(drawn), widest, squeeze=False)
  for across, (run, layers) in zip(panels, drawn.items(), strict=True):
    for unused in across[len(layers) :]:
      unused.remove()
    own = grouped(by[run], 1)
    yield (
      run,
      [
        (layer, axes, own[layer])
        for layer, axes in zip(layers, across, strict=False)
      ],
    )


def planes(name: str, title: str, caption: str, rows: Sequence[Row]) -> Figure:
  """Tokens in a plane, a row a run and a column a layer, some of them named.

  Args:
    name, title, caption: of the figure.
    rows: (run, layer, place, token, named, x, y).
  """
  drawn = _drawn(rows)

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    for run, layers in _grid(canvas, rows, drawn):
      names = {r[2]: r[3] for r in layers[0][2] if r[4]}
      for layer, axes, own in layers:
        # What spreads is seen by its scale, which stands above it.
        reach = max((max(abs(r[5]), abs(r[6])) for r in own), default=1) or 1
        axes.grid(visible=False)
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.set(xlim=(-1.1 * reach, 1.1 * reach))
        axes.set(ylim=(-1.1 * reach, 1.1 * reach))
        place = f"layer {layer}" if layer else "embedding"
        axes.set_title(f"{run}\n{place}, width {2.2 * reach:.3g}")
        axes.plot(
          [r[5] for r in own], [r[6] for r in own], "o", color="0.75", ms=3
        )
        for number, where in enumerate(names):
          at = next((r for r in own if r[2] == where), None)
          if at is not None:
            how = style(number) | {"linestyle": "", "markersize": 6}
            axes.plot(at[5], at[6], label=literal(names[where]), **how)
      # Runs may have other tokens.
      layers[-1][1].legend(loc="center left", bbox_to_anchor=(1, 0.5))

  columns = ("run", "layer", "place", "token", "named", "x", "y")
  widest = max(map(len, drawn.values()), default=1)
  size = (2.2 * widest + 1.2, 2.6 * len(drawn) + 0.4)
  return Figure(name, title, caption, columns, rows, paint, size)


def maps(name: str, title: str, caption: str, rows: Sequence[Row]) -> Figure:
  """Attention matrices of one sample, a row a run and a column a layer.

  Args:
    name, title, caption: of the figure.
    rows: (run, layer, query, key, weight).
  """
  drawn = _drawn(rows)

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    for run, layers in _grid(canvas, rows, drawn):
      for layer, axes, own in layers:
        axes.grid(visible=False)
        axes.set_title(f"{run}, layer {layer}")
        n = 1 + max(r[2] for r in own)
        image = np.zeros((n, 1 + max(r[3] for r in own)))
        for r in own:
          image[r[2], r[3]] = r[4]
        shown = axes.imshow(image, cmap="cividis", vmin=0)
        canvas.colorbar(shown, ax=axes, shrink=0.7)
        axes.set_xlabel("key")
        for axis in (axes.xaxis, axes.yaxis):
          axis.get_major_locator().set_params(integer=True)
      layers[0][1].set_ylabel("query")

  columns = ("run", "layer", "query", "key", "attention weight")
  widest = max(map(len, drawn.values()), default=1)
  size = (2.5 * widest, 2.4 * len(drawn) + 0.2)
  return Figure(name, title, caption, columns, rows, paint, size)


def against(
  name: str,
  title: str,
  caption: str,
  rows: Sequence[Row],
  axes_of: Mapping[str, str],
  quantity: str,
) -> Figure:
  """A score against sizes of the model, a panel a size.

  Args:
    name, title, caption: of the figure.
    rows: (model, seed, size, value, score).
    axes_of: of every size, what is on its axis.
    quantity: the score, with its unit.
  """

  def paint(canvas: Any, rows: Sequence[Row]) -> None:
    there = [key for key in axes_of if any(row[2] == key for row in rows)]
    panels = canvas.subplots(1, len(there), squeeze=False, sharey=True)[0]
    for panel, key in zip(panels, there, strict=True):
      for number, (model, own) in enumerate(grouped(rows).items()):
        found = averaged([row for row in own if row[2] == key], 3, 4)
        if found[0]:
          error_bars(panel, *found, number, model)
      panel.set_xlabel(axes_of[key])
      panel.set_xticks(sorted({row[3] for row in rows if row[2] == key}))
    panels[0].set_ylabel(quantity)
    legend(canvas, *panels)

  columns = ("model", "seed", "size", "value", quantity)
  width = len({row[2] for row in rows})
  size = (max(2.6 * width, 4.8), 3.2)
  return Figure(name, title, caption, columns, rows, paint, size)
