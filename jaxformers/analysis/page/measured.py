"""What is drawn of trained models: distances, entropies, tokens, attention."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformers.analysis.evaluation import layers
from jaxformers.analysis.page import texts
from jaxformers.analysis.page.page import Page
from jaxformers.analysis.plotting import figures, plots
from jaxformers.analysis.tables.runs import SIZES, Group, by_size
from jaxformers.analysis.tokens import entropy, smoothness
from jaxformers.analysis.tokens.capture import capture, num_tokens
from jaxformers.models.variables import make_variables


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured of every run.

  Attributes:
    samples: examples of the test split.
    length: tokens of each at most.
    estimator, axis: of the entropy.
    text: sentence for the figures of single tokens; "" for the paper's, or
      where that is no text of the task for the beginning of a test sample.
    named: tokens of it to name, or of letters words; () for the longest.
  """

  samples: int = 32
  length: int = 512
  estimator: str = "vasicek"
  axis: str = "units"
  text: str = ""
  named: tuple[str, ...] = ()


class Rows:
  """Rows of all figures that need a trained model."""

  def __init__(self, options: Options) -> None:
    self.options = options
    names = ("factors", "entropy", "shape", "parts", "gates", "smooth")
    self.of: dict[str, list[figures.Row]] = {name: [] for name in names}
    self.pairs: list[figures.Row] = []
    self.planes: list[figures.Row] = []
    self.maps: list[figures.Row] = []
    self.values: list[int] = []
    self.finite = 1.0
    self.samples: set[int] = set()
    self.lengths: set[int] = set()
    self.quoted: dict[str, str] = {}

  def model(self, label: str, seed: int, run: Any, start: bool) -> None:
    """Distributions and curves of a run, and of its untrained start."""
    o = self.options
    ids = run.sample(o.samples, o.length)
    self.lengths.add(num_tokens(run.model, ids))
    kw = {"axis": o.axis, "estimator": o.estimator}
    states = [(label, run.params)]
    if start and run.start is not None:
      states.append((label + figures.UNTRAINED, run.start))
    for name, params in states:
      found = layers.measure(run.model, params, ids, **kw)
      trained = name == label
      self.finite = min(self.finite, float(np.nanmin(found.finite)))
      self.samples.add(found.factors.shape[1])
      self.values.append(int(np.median(found.values)))
      for key in ("factors", "entropy", "shape"):
        self.of[key] += _long(name, seed, getattr(found, key))
      if found.parts is not None and trained:
        self.of["parts"] += [
          (name, seed, layer + 1, part, k, value)
          for (layer, part, k), value in np.ndenumerate(found.parts)
        ]
      if found.gates is not None and trained:
        self.of["gates"] += [
          (name, seed, layer + 1, k, expert, value)
          for (layer, k, expert), value in np.ndenumerate(found.gates)
        ]
    smooth = smoothness.measure(run.model, run.params, ids)
    self.of["smooth"] += smoothness.rows(label, seed, smooth)

  def data(self) -> str:
    """Returns how many samples, tokens and seeds there are, in words."""
    runs = {
      row[:2]
      for row in self.of["factors"]
      if not row[0].endswith(figures.UNTRAINED)
    }
    seeds = [
      sum(run == name for run, _ in runs) for name in {r for r, _ in runs}
    ]
    return figures.describe_data(self.samples, self.lengths, seeds)

  def texts(self) -> str:
    """Returns the text that the single tokens are from, in words."""
    by = figures.grouped([(text, label) for label, text in self.quoted.items()])
    told = []
    for text, own in by.items():
      whose = ", ".join(row[1] for row in own)
      told.append(text + (f" ({whose})" if len(by) > 1 else ""))
    return f"Text: {'; '.join(told)}. One seed."

  def tokens(self, label: str, run: Any) -> None:
    """Single tokens of one text; ValueError if the task has no tokens."""
    ids, names, words, quote = texts.example(
      run, self.options.text, self.options.length
    )
    num_inputs = run.model.config.num_inputs
    if num_inputs > 1:  # The same twice: the first is looked at.
      ids = np.stack([ids] * num_inputs)
    given = make_variables(run.model, run.params)
    seen = capture(run.model, given, jnp.asarray(ids)[None])
    hidden, mask = layers.tokens(seen)
    if len(mask) > len(names):  # A token of the encoder's own stands first.
      names, words = (["<cls>", *listed] for listed in (names, words))
    chosen = texts.name_tokens(words, self.options.named)
    around = layers.plane(hidden, mask)
    self.quoted[label] = quote
    there = np.flatnonzero(mask)
    self.planes += [
      (label, layer, int(place), names[place], int(place in chosen), *point)
      for layer, points in enumerate(around)
      for place, point in zip(there, points.tolist(), strict=True)
    ]
    places = list(itertools.combinations(chosen, 2))[:4]
    apart = layers.distances(hidden, mask, places)
    self.pairs += [
      (
        label,
        f"{names[i]} - {names[j]}",
        layer,
        *(float(apart[key][layer, k]) for key in ("euclidean", "cosine")),
      )
      for k, (i, j) in enumerate(places)
      for layer in range(len(hidden))
    ]
    causal = run.model.objective == "language_model"
    for layer, weights in enumerate(smoothness.maps(seen, causal), 1):
      self.maps += [
        (label, layer, i, j, float(w)) for (i, j), w in np.ndenumerate(weights)
      ]


def _long(label: str, seed: int, values: np.ndarray) -> list[figures.Row]:
  return [
    (label, seed, layer, k, float(value))
    for (layer, k), value in np.ndenumerate(values)
  ]


def _correlations(rows: Rows) -> str:
  """Of every run, over layers, samples and seeds, in words."""
  entropies = {row[:4]: row[4] for row in rows.of["entropy"]}
  told = []
  for label, own in figures.grouped(rows.of["factors"]).items():
    if label.endswith(figures.UNTRAINED):
      continue
    both = np.array([(row[4], entropies[row[:4]]) for row in own if row[2]])
    both = both[np.isfinite(both).all(1)]
    if len(both) > 1 and (both.std(0) > 0).all():
      told.append(f"{label} {np.corrcoef(both.T)[0, 1]:.2f}")
  return ", ".join(told) or "none"


def _at_the_end(
  found: Sequence[Group], rows: Rows, key: str
) -> list[figures.Row]:
  """A quantity of the last layer against sizes, a mean over samples a seed."""
  measured = figures.grouped(rows.of[key])
  made = []
  for line, name, value, group in by_size(found):
    for seed, own in figures.grouped(measured.get(group.label, ()), 1).items():
      last = figures.grouped(own, 2)
      mean, _ = figures.spread([row[4] for row in last[max(last)]])
      made.append((line, seed, name, value, mean))
  return made


def add(page: Page, found: Sequence[Group], options: Options) -> None:
  """All figures that need checkpoints; what has none is noted."""
  from jaxformers import trained

  rows = Rows(options)
  for group in found:
    first = True
    for one in group.runs:
      try:
        run = trained.load(one.folder)
      except (ValueError, OSError) as error:
        page.notes.append(f"{one.folder}: no figures of its layers. {error}")
        continue
      if run.task.objective == "segmentation":
        page.notes.append(
          f"{one.folder}: segmenters have no figures of layers."
        )
        continue
      rows.model(group.label, one.seed, run, start=first)
      if not first:
        continue
      first = False
      try:
        rows.tokens(group.label, run)
      except ValueError as error:
        page.notes.append(
          f"{group.label}: no figure of single tokens, {error}."
        )
  _transject(page, found, rows, options)
  _smooth(page, rows)


def _transject(
  page: Page, found: Sequence[Group], rows: Rows, options: Options
) -> None:
  o, section = options, "Distances and entropy"
  data = rows.data()
  boxes = "Boxes: quartiles over samples; whiskers: 5 % and 95 %."
  page.add(
    section,
    plots.over_layers(
      "activation_factors",
      "Activation factors",
      "Mean over pairs of tokens of a sample of |x_i - x_j| after a layer over "
      f"that of the embedding (TransJect, equation 9). {data}; the "
      f"untrained start of the first seed beside them. {boxes} Exactly 1 at "
      "TransJect's start; near 1 for random rotations as well.",
      rows.of["factors"],
      "activation factor",
      lines=((1.0, "distances kept"),),
      ratio=True,
    ),
  )
  what = {
    "units": "one token over its units",
    "tokens": "one unit over a sample's tokens",
  }[o.axis]
  note = (
    f"Differential entropy of the values of {what}, by the estimator "
    f"{o.estimator!r}, mean over a sample. {data}; the untrained start of the "
    f"first seed beside them. {boxes} At least {100 * rows.finite:.0f} % of "
    "what is averaged in a layer has an entropy (no ties, and values enough); "
    "the rest is left out."
  )
  for key, title, quantity in (
    ("entropy", "Entropy", "entropy, nats"),
    ("shape", "Entropy at deviation 1", "entropy - log deviation, nats"),
  ):
    extra = (
      f" Correlation with the activation factor: {_correlations(rows)}."
      if key == "entropy"
      else (
        " Without the scale. No distribution has more than a normal one, "
        f"{entropy.GAUSSIAN:.3f}; estimates from few values are lower, by how "
        "much depends on the distribution. The lines are what the estimator "
        "gives of as many normal values."
      )
    )
    normal = [
      (entropy.normal(count, o.estimator), f"normal, {count} values")
      for count in dict.fromkeys(rows.values)
      if count >= entropy.LEAST
    ]
    page.add(
      section,
      plots.over_layers(
        key,
        title,
        note + extra,
        rows.of[key],
        quantity,
        lines=tuple(normal) if key == "shape" else (),
      ),
    )
  for key, quantity in (
    ("factors", "activation factor"),
    ("entropy", "entropy, nats"),
  ):
    ends = _at_the_end(found, rows, key)
    if ends:
      page.add(
        section,
        plots.against(
          f"{key}_sizes",
          f"{quantity.partition(',')[0].capitalize()} against sizes",
          "Of the last layer, mean over samples, and over seeds with their "
          "deviation; along a line nothing else differs (TransJect, figure "
          f"5). {data}.",
          ends,
          SIZES,
          quantity,
        ),
      )
  page.add(
    section,
    plots.parts(
      "parts",
      "Entropy of heads and experts",
      "Of what every head puts out before the projection back, and of x + "
      "a F(x) of every expert (TransJect, figure 4b), by the estimator "
      f"{o.estimator!r}. {data}. Experts share x, so they differ little; heads "
      "have another scale than x.",
      rows.of["parts"],
    ),
  )
  if rows.of["gates"]:
    page.add(
      section,
      plots.histogram(
        "experts",
        "Weights of the experts",
        f"Of every sample and expert, by layer (TransJect, figure 6). {data}. "
        "The dotted line is 1 / E, the weights at the start.",
        rows.of["gates"],
        "weight of an expert",
      ),
    )
  section = "Single tokens"
  quoted = rows.texts()
  page.add(
    section,
    plots.pairs(
      "pairs",
      "Distances of pairs of tokens",
      f"Layer by layer (TransJect, figure 1). {quoted}",
      rows.pairs,
    ),
  )
  page.add(
    section,
    plots.planes(
      "isomap",
      "Tokens in a plane",
      "Isomap of every layer for itself, turned to lie near the one before; "
      f"its width stands above it (TransJect, figure 7). {quoted}",
      rows.planes,
    ),
  )


def _smooth(page: Page, rows: Rows) -> None:
  section = "Over-smoothing"
  page.add(
    section,
    smoothness.figure(
      rows.of["smooth"],
      rows.data(),
    ),
  )
  page.add(
    section,
    plots.maps(
      "attention",
      "Attention maps",
      "softmax(q k / sqrt e), mean over heads: what softmax attention weighs, "
      "and other mixers with queries and keys would; models without keys are "
      f"left out. {rows.texts()}",
      rows.maps,
    ),
  )
