"""Figures: a table of rows, written as CSV, and a picture drawn from it.

Every figure can be read without its page: axes have units, and the caption
states the number of samples and of seeds. The colours are by Okabe and Ito, and
can be distinguished by colour-blind readers. Lines also differ in dash and
marker, for print.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformers.foundations import requirements

# Palette of Okabe and Ito 2008, with black last.
COLOURS = (
  "#0072B2",
  "#D55E00",
  "#009E73",
  "#CC79A7",
  "#E69F00",
  "#56B4E9",
  "#000000",
)
MARKERS = "os^Dv<P"
DASHES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
  "font.size": 9,
  "axes.titlesize": 9,
  "axes.grid": True,
  "grid.alpha": 0.3,
  "axes.axisbelow": True,
  "axes.formatter.useoffset": False,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "legend.frameon": False,
  "lines.markersize": 4,
  "savefig.dpi": 150,
  "svg.hashsalt": "jaxformers",
}

LEAST_LETTERS = 8  # Shortest length of the lines to which labels are wrapped.
MOST_MARKED = 20  # Largest number of points of a line that always has markers.

Row = tuple[Any, ...]


class Texts(NamedTuple):
  """Name, title and caption of a `Figure`."""

  name: str
  title: str
  caption: str


@dataclasses.dataclass(frozen=True)
class Figure:
  """Table of rows, with a function that draws it.

  Attributes:
    name: name of the files, and anchor on a page.
    title: title above the picture.
    caption: sentences that describe the figure, with the number of samples and
      seeds.
    columns: names of the table's columns, with units.
    rows: rows of the table.
    paint: function (fig, rows) that draws the rows on an empty figure of
      matplotlib.
    size: width and height in inches.
  """

  name: str
  title: str
  caption: str
  columns: tuple[str, ...]
  rows: Sequence[Row]
  paint: Callable[[Any, Sequence[Row]], None]
  size: tuple[float, float] = (6.4, 3.4)

  def csv(self) -> str:
    """Returns the columns' names and the rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([self.columns, *self.rows])
    return text.getvalue()

  def draw(self) -> Any:
    """Returns a matplotlib figure of the rows, with labels that fit."""
    requirements.require("plots", f"The figure {self.name!r}")
    import matplotlib.figure

    with matplotlib.rc_context(STYLE):
      fig = matplotlib.figure.Figure(self.size, layout="constrained")
      self.paint(fig, self.rows)
      fit_labels(fig)
    return fig

  def picture(self, kind: str) -> bytes:
    """Returns the picture as bytes in the format "png" or "svg"."""
    return self._pictures(kind)[0]

  def _pictures(self, *kinds: str) -> list[bytes]:
    """Draws the figure once; returns it in each format."""
    requirements.require("plots", f"The figure {self.name!r}")
    import matplotlib

    pictures = []
    with matplotlib.rc_context(STYLE):
      fig = self.draw()
      for kind in kinds:
        out = io.BytesIO()
        # Omit the date, so that equal figures give equal files.
        metadata = {"Date": None} if kind == "svg" else {}
        fig.savefig(out, format=kind, metadata=metadata)
        pictures.append(out.getvalue())
    return pictures

  def write(self, folder: Path) -> list[Path]:
    """Writes NAME.csv, NAME.png and NAME.svg; returns their paths."""
    svg, png = self._pictures("svg", "png")
    folder.mkdir(parents=True, exist_ok=True)
    content = {"csv": self.csv().encode(), "png": png, "svg": svg}
    paths = [folder / f"{self.name}.{kind}" for kind in content]
    for path, data in zip(paths, content.values(), strict=True):
      path.write_bytes(data)
    return paths


def describe_data(
  samples: Iterable[int],
  tokens: Iterable[int],
  seeds: Collection[int],
  split: str = "test",
) -> str:
  """Returns the number of samples, tokens and seeds of a figure, in words.

  Runs may differ in these numbers, for example "32 test samples of at most 50
  or 200 tokens, 1 to 3 seeds".

  Args:
    samples: number of examples of each run.
    tokens: number of tokens of the longest example of each run.
    seeds: number of seeds of each run.
    split: name of the split of the examples.
  """
  sizes, lengths = (
    " or ".join(map(str, sorted({*counts}))) for counts in (samples, tokens)
  )
  # Give a range if runs have different numbers of seeds.
  few, many = min(seeds, default=0), max(seeds, default=0)
  counted = f"{few}" if few == many else f"{few} to {many}"
  return (
    f"{sizes} {split} samples of at most {lengths} tokens, "
    f"{counted} seed{'' if many == 1 else 's'}"
  )


def fit_labels(fig: Any) -> None:
  """Fixes the ticks, and wraps titles and labels that do not fit.

  The layout depends on the widths of the tick labels, and the number of ticks
  depends on the layout. Ticks that are not fixed can alternate between two
  layouts, so that a label is clipped.

  Args:
    fig: figure of matplotlib with a constrained layout.
  """
  from matplotlib.ticker import FixedLocator

  # Fix the ticks as they are in the first layout.
  fig.draw_without_rendering()
  for axes in fig.axes:
    for axis in (axes.xaxis, axes.yaxis):
      axis.set_major_locator(FixedLocator(axis.get_majorticklocs()))
  # Wrap until everything fits: each added line of a title shrinks the axes.
  is_wrapped = True
  while is_wrapped:
    fig.draw_without_rendering()
    is_wrapped = False
    for axes in fig.axes:
      # The vertical label runs along the height of the axes.
      sides = {axes.title: "width", axes.xaxis.label: "width"}
      for label, side in (sides | {axes.yaxis.label: "height"}).items():
        length = getattr(axes.get_window_extent(), side)
        needed = getattr(label.get_window_extent(), side)
        # Compute the number of letters that fit on a line.
        lines = label.get_text().splitlines()
        longest = max(map(len, lines), default=0)
        most = int(longest * length / needed) if needed else longest
        if LEAST_LETTERS <= most < longest:
          wrapped = (textwrap.fill(text, most) for text in lines)
          label.set_text("\n".join(wrapped))
          is_wrapped = True


def style(number: int) -> dict[str, Any]:
  """Returns colour, dash and marker of line `number`, counted from 0."""
  return {
    "color": COLOURS[number % len(COLOURS)],
    "linestyle": DASHES[number % len(DASHES)],
    "marker": MARKERS[number % len(MARKERS)],
  }


def draw_legend(fig: Any, *panels: Any, title: str = "", cols: int = 3) -> None:
  """Draws one legend above all panels, if it has more than one entry.

  Args:
    fig: figure of matplotlib.
    *panels: axes of matplotlib, whose labels are listed.
    title: title of the legend.
    cols: largest number of columns.
  """
  letters = int(13 * fig.get_figwidth())  # Letters that fit on one line.
  # List a label once, even if several panels have it.
  entries = {
    textwrap.fill(label, letters - 8): handle
    for axes in panels
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
  }
  if len(entries) > 1:
    longest = max(len(row) for label in entries for row in label.splitlines())
    # Fit as many columns as the longest label allows.
    room = letters // (8 + longest)
    fig.legend(
      entries.values(),
      entries.keys(),
      loc="outside upper center",
      ncols=max(1, min(len(entries), cols, room)),
      title=title or None,
    )


def literal(text: str) -> str:
  """Returns a label that matplotlib shows literally.

  Escapes "$", which would begin a formula, and a leading "_", which would hide
  the label. Wraps lines at 24 letters, for narrow legends.
  """
  text = textwrap.fill(text, 24).replace("$", r"\$")
  return f"\u200b{text}" if text.startswith("_") else text


def grouped(rows: Iterable[Row], place: int = 0) -> dict[Any, list[Row]]:
  """Returns rows grouped by a column, in the order of their appearance.

  Args:
    rows: rows of a table.
    place: index of the column.
  """
  groups: dict[Any, list[Row]] = {}
  for row in rows:
    groups.setdefault(row[place], []).append(row)
  return groups


def evenly_spaced(values: Sequence[Any], most: int) -> list[Any]:
  """Returns at most `most` values, including the first and the last."""
  # Rounding can give the same place twice: keep it once.
  places = np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))
  return [values[k] for k in places]


def finite_spread(values: Sequence[float]) -> tuple[float, float]:
  """Returns mean and sample deviation of the finite values.

  The mean is NaN without values; the deviation is NaN for fewer than two.
  """
  finite = [v for v in values if v is not None and math.isfinite(v)]
  if not finite:
    return math.nan, math.nan
  deviation = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
  return float(np.mean(finite)), deviation


class Points(NamedTuple):
  """Points of a line.

  Attributes:
    x: places on the horizontal axis.
    mean: mean at each place; NaN if there is none.
    deviation: deviation at each place; NaN if there is none.
  """

  x: Sequence[Any]
  mean: Sequence[float]
  deviation: Sequence[float]


def averaged(rows: Iterable[Row], place: int, value: int) -> Points:
  """Returns mean and deviation of a column at each place, sorted by place.

  Args:
    rows: rows of a table.
    place: index of the column with the place.
    value: index of the column to average.
  """
  by_place = sorted(grouped(rows, place).items())
  spreads = [finite_spread([row[value] for row in at]) for _, at in by_place]
  return Points(
    [k for k, _ in by_place], [m for m, _ in spreads], [d for _, d in spreads]
  )


def draw_error_bars(axes: Any, points: Points, number: int, label: str) -> None:
  """Draws a line with error bars of one deviation, if it is finite."""
  bars = np.nan_to_num(points.deviation)
  look = {"capsize": 3, "label": label, **style(number)}
  axes.errorbar(points.x, points.mean, bars, **look)


def draw_line(
  axes: Any, points: Points, number: int, label: str, *, markers: bool = True
) -> None:
  """Draws a line with a band of one deviation, if it is finite.

  A single point is labelled with its value, and has an error bar instead of the
  band.

  Args:
    axes: axes of matplotlib.
    points: points of the line.
    number: number of the line, for its style.
    label: label in the legend.
    markers: False to draw no markers on a line of more than 20 points.
  """
  # Draw the means as a line.
  x, mean, deviation = (np.asarray(v, float) for v in points)
  look = style(number)
  finite = np.flatnonzero(np.isfinite(mean))
  # Many markers would hide the line.
  if not markers and len(finite) > MOST_MARKED:
    del look["marker"]
  axes.plot(x, mean, label=label, **look)
  if len(finite) == 1:
    (k,) = finite
    # Alternate the sides of the values of several lines.
    side, align = ((8, "left"), (-8, "right"))[number % 2]
    place = {"textcoords": "offset points", "ha": align, "va": "center"}
    point, text = (x[k], mean[k]), f"{mean[k]:.4g}"
    axes.annotate(text, point, (side, 0), color=look["color"], **place)
    if np.isfinite(deviation[k]):
      axes.errorbar(*point, deviation[k], capsize=3, color=look["color"])
  elif np.isfinite(deviation).any():
    # Draw a band around a line of several points.
    band = {"color": look["color"], "alpha": 0.2, "linewidth": 0}
    axes.fill_between(x, mean - deviation, mean + deviation, **band)


WHISKERS = (5, 95)  # Percentiles at which the whiskers of boxes end.
UNTRAINED = ", untrained"  # End of the label of an untrained start.


def draw_boxes(
  axes: Any,
  groups: Mapping[str, dict[Any, list[float]]],
  whiskers: tuple[float, float] = WHISKERS,
) -> None:
  """Draws boxes of several groups side by side at every category.

  A box shows the quartiles and the median. The box of an untrained start has
  the colour of its run, and is not filled.

  Args:
    axes: axes of matplotlib.
    groups: values by label and category. Values that are not finite are
      skipped.
    whiskers: percentiles at which the whiskers of a box end.
  """
  from matplotlib.colors import to_rgba

  # Sort the categories of all runs: layers by number, and then "all".
  named = dict.fromkeys(c for g in groups.values() for c in g)
  categories = sorted(
    named, key=lambda c: int(c) if str(c).isdigit() else math.inf
  )
  trained = [label for label in groups if not label.endswith(UNTRAINED)]
  width = 0.8 / max(len(groups), 1)
  for number, (label, group) in enumerate(groups.items()):
    # Choose the colour of the run, also for its untrained start.
    run = label.removesuffix(UNTRAINED)
    place = trained.index(run) if run in trained else number
    colour = COLOURS[place % len(COLOURS)]
    dash = "-" if run == label else (0, (2, 1))
    face = to_rgba(colour, 0.35 if run == label else 0.0)
    # Centre the boxes of a category around its place.
    offset = (number - (len(groups) - 1) / 2) * width
    # Collect the finite values of each category that has any.
    boxes = {
      k + offset: values
      for k, category in enumerate(categories)
      if (values := [v for v in group.get(category, ()) if math.isfinite(v)])
    }
    if boxes:
      axes.boxplot(
        list(boxes.values()),
        positions=list(boxes),
        widths=0.8 * width,
        whis=whiskers,
        showfliers=False,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": face, "edgecolor": colour, "linestyle": dash},
        medianprops={"color": colour, "linewidth": 2},
        whiskerprops={"color": colour, "linestyle": dash},
        capprops={"color": colour},
      )
      # Boxes have no legend entry: add an empty line for the legend.
      axes.plot([], [], "s", mfc=face, mec=colour, ms=7, label=label)
  axes.set_xticks(range(len(categories)), [str(c) for c in categories])
