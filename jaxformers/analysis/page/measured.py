"""Figures of trained models: distances, entropies, tokens, attention."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformers import trained
from jaxformers.analysis.evaluation import layers
from jaxformers.analysis.page import texts
from jaxformers.analysis.page.page import Page
from jaxformers.analysis.plotting import figures, plots
from jaxformers.analysis.tables.runs import SIZES, SeedGroup, by_size
from jaxformers.analysis.tokens import entropy, smoothness
from jaxformers.analysis.tokens.capture import capture, num_tokens
from jaxformers.errors import UserError
from jaxformers.models.variables import make_variables

MOST_PAIRS = 4  # Pairs of tokens whose distances are drawn.
QUANTITIES = ("factors", "entropy", "shape", "parts", "gates", "smooth")
BOXES = "Boxes: quartiles over samples; whiskers: 5 % and 95 %."


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the measurements of every run.

  Attributes:
    samples: number of examples of the test split.
    length: most tokens of an example.
    estimator, axis: options of the entropy, see `entropy.of_tokens`.
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
  """Rows of all figures that need a trained model.

  Attributes:
    of: rows of the figures over layers, by the names of `QUANTITIES`.
    pairs, planes, maps: rows of the figures of single tokens.
  """

  def __init__(self, options: Options) -> None:
    self.options = options
    self.of: dict[str, list[figures.Row]] = {name: [] for name in QUANTITIES}
    self.pairs: list[figures.Row] = []
    self.planes: list[figures.Row] = []
    self.maps: list[figures.Row] = []
    # Facts that captions state.
    self.values: list[int] = []
    self.finite = 1.0
    self.samples: set[int] = set()
    self.lengths: set[int] = set()
    self.quotes: dict[str, str] = {}

  def add_model(self, label: str, seed: int, run: Any, start: bool) -> None:
    """Measures the layers of a run, and of its untrained start.

    Args:
      label: label of the run in the figures.
      seed: seed of the run.
      run: result of `trained.load`.
      start: True to measure the untrained start as well.
    """
    options = self.options
    # All states read the same samples.
    ids = run.sample(options.samples, options.length)
    self.lengths.add(num_tokens(run.model, ids))
    # The untrained start is a run of its own in the figures.
    states = [(label, run.params)]
    if start and run.start is not None:
      states.append((label + figures.UNTRAINED, run.start))
    for name, params in states:
      statistics = layers.measure_layers(
        run.model,
        params,
        ids,
        axis=options.axis,
        estimator=options.estimator,
      )
      # Collect the facts that captions state.
      self.finite = min(self.finite, float(np.nanmin(statistics.finite)))
      self.samples.add(statistics.factors.shape[1])
      self.values.append(int(np.median(statistics.values)))
      for key in ("factors", "entropy", "shape"):
        self.of[key] += _enumerate(name, seed, getattr(statistics, key))
      # Heads and experts are drawn after training alone.
      if name == label and statistics.parts is not None:
        self.of["parts"] += _enumerate(name, seed, statistics.parts, 1)
      if name == label and statistics.gates is not None:
        self.of["gates"] += _enumerate(name, seed, statistics.gates, 1)
    # Smoothness of the trained model.
    curves = smoothness.measure_curves(run.model, run.params, ids)
    self.of["smooth"] += smoothness.rows(label, seed, curves)

  def describe_data(self) -> str:
    """Returns how many samples, tokens and seeds there are, in words."""
    # Count the seeds of each run, not of its untrained start.
    runs = {
      row[:2]
      for row in self.of["factors"]
      if not row[0].endswith(figures.UNTRAINED)
    }
    labels = [label for label, _ in runs]
    seeds = [labels.count(label) for label in {*labels}]
    return figures.describe_data(self.samples, self.lengths, seeds)

  def describe_texts(self) -> str:
    """Returns the text that the single tokens are from, in words."""
    quotes = [(quote, label) for label, quote in self.quotes.items()]
    # Runs of one task show the same text.
    by_quote = figures.grouped(quotes)
    described = []
    for quote, rows in by_quote.items():
      runs = ", ".join(label for _, label in rows)
      described.append(quote + (f" ({runs})" if len(by_quote) > 1 else ""))
    return f"Text: {'; '.join(described)}. One seed."

  def add_tokens(self, label: str, run: Any) -> None:
    """Measures single tokens of one text.

    Args:
      label: label of the run in the figures.
      run: result of `trained.load`.

    Raises:
      UserError: if the task has no tokens.
    """
    ids, names, words, quote = texts.example(
      run, self.options.text, self.options.length
    )
    # A model of pairs reads the text twice, and the first is drawn.
    if run.model.config.num_inputs > 1:
      ids = np.stack([ids] * run.model.config.num_inputs)
    # Capture the hidden states of this one text.
    variables = make_variables(run.model, run.params)
    captured = capture(run.model, variables, jnp.asarray(ids)[None])
    hidden, mask = layers.tokens(captured)
    if len(mask) > len(names):  # The encoder's own token stands first.
      names, words = ["<cls>", *names], ["<cls>", *words]
    named = texts.name_tokens(words, self.options.named)
    planes = layers.plane(hidden, mask)
    self.quotes[label] = quote
    # Tokens in a plane, layer by layer.
    # `plane` leaves out padding: its k-th point is the k-th token.
    places = np.flatnonzero(mask)
    self.planes += [
      (label, layer, int(place), names[place], int(place in named), *point)
      for layer, points in enumerate(planes)
      for place, point in zip(places, points.tolist(), strict=True)
    ]
    # Distances of pairs of the named tokens.
    pairs = list(itertools.combinations(named, 2))[:MOST_PAIRS]
    apart = layers.distances(hidden, mask, pairs)
    self.pairs += [
      (
        label,
        f"{names[i]} - {names[j]}",
        layer,
        *(float(apart[key][layer, k]) for key in ("euclidean", "cosine")),
      )
      for k, (i, j) in enumerate(pairs)
      for layer in range(len(hidden))
    ]
    # Attention weights.
    causal = run.model.objective == "language_model"
    for layer, weights in enumerate(smoothness.maps(captured, causal), 1):
      self.maps += [
        (label, layer, i, j, float(w)) for (i, j), w in np.ndenumerate(weights)
      ]


def _enumerate(
  label: str, seed: int, values: np.ndarray, first_layer: int = 0
) -> list[figures.Row]:
  """Returns rows (label, seed, layer, *indices, value) of an array."""
  return [
    (label, seed, first_layer + layer, *indices, float(value))
    for (layer, *indices), value in np.ndenumerate(values)
  ]


def _correlations(rows: Rows) -> str:
  """Returns the correlation of factor and entropy for each run, in words.

  Over layers, samples and seeds, without the embedding.
  """
  # Factor and entropy belong together by (label, seed, layer, sample).
  entropies = {row[:4]: row[4] for row in rows.of["entropy"]}
  described = []
  for label, factors in figures.grouped(rows.of["factors"]).items():
    if label.endswith(figures.UNTRAINED):
      continue
    pairs = [(row[4], entropies[row[:4]]) for row in factors if row[2]]
    values = np.array(pairs)
    values = values[np.isfinite(values).all(1)]
    # Without variance there is no correlation.
    if len(values) > 1 and (values.std(0) > 0).all():
      described.append(f"{label} {np.corrcoef(values.T)[0, 1]:.2f}")
  return ", ".join(described) or "none"


def _last_layer(
  groups: Sequence[SeedGroup], rows: Rows, key: str
) -> list[figures.Row]:
  """Returns the last layer's mean over samples, by size and seed."""
  # Rows are (label, seed, layer, sample, value).
  by_label = figures.grouped(rows.of[key])
  means = []
  for line, name, value, group in by_size(groups):
    by_seed = figures.grouped(by_label.get(group.label, ()), 1)
    for seed, seed_rows in by_seed.items():
      by_layer = figures.grouped(seed_rows, 2)
      mean, _ = figures.finite_spread(
        [row[4] for row in by_layer[max(by_layer)]]
      )
      means.append((line, seed, name, value, mean))
  return means


def add(page: Page, groups: Sequence[SeedGroup], options: Options) -> None:
  """Adds all figures that need checkpoints, and notes on runs without.

  Args:
    page: page to add to.
    groups: result of `runs.group_by_recipe`.
    options: options of the measurements.
  """
  rows = Rows(options)
  for group in groups:
    # Single tokens and the untrained start are those of the first seed.
    first = True
    for record in group.runs:
      # A run that cannot be loaded is noted, and the others are drawn.
      try:
        run = trained.load(record.folder)
      except (UserError, OSError) as error:
        page.notes.append(f"{record.folder}: no figures of its layers. {error}")
        continue
      if run.task.objective == "segmentation":
        page.notes.append(
          f"{record.folder}: segmenters have no figures of layers."
        )
        continue
      rows.add_model(group.label, record.seed, run, start=first)
      if not first:
        continue
      first = False
      try:
        rows.add_tokens(group.label, run)
      except UserError as error:
        page.notes.append(
          f"{group.label}: no figure of single tokens, {error}."
        )
  # Figures stand on the page in this order.
  _add_distances(page, rows)
  _add_entropies(page, rows)
  _add_sizes(page, groups, rows)
  _add_parts(page, rows)
  _add_tokens(page, rows)
  _add_smoothness(page, rows)


SECTION = "Distances and entropy"


def _add_distances(page: Page, rows: Rows) -> None:
  page.add(
    SECTION,
    plots.over_layers(
      "activation_factors",
      "Activation factors",
      "Mean over pairs of tokens of a sample of |x_i - x_j| after a layer over "
      "that of the embedding (TransJect, equation 9). "
      f"{rows.describe_data()}; the untrained start of the first seed beside "
      f"them. {BOXES} Exactly 1 at TransJect's start; near 1 for random "
      "rotations as well.",
      rows.of["factors"],
      "activation factor",
      lines=((1.0, "distances kept"),),
      ratio=True,
    ),
  )


def _add_entropies(page: Page, rows: Rows) -> None:
  options = rows.options
  values = {
    "units": "one token over its units",
    "tokens": "one unit over a sample's tokens",
  }[options.axis]
  caption = (
    f"Differential entropy of the values of {values}, by the estimator "
    f"{options.estimator!r}, mean over a sample. {rows.describe_data()}; the "
    f"untrained start of the first seed beside them. {BOXES} At least "
    f"{100 * rows.finite:.0f} % of what is averaged in a layer has an entropy "
    "(no ties, and values enough); the rest is left out."
  )
  page.add(
    SECTION,
    plots.over_layers(
      "entropy",
      "Entropy",
      f"{caption} Correlation with the activation factor: "
      f"{_correlations(rows)}.",
      rows.of["entropy"],
      "entropy, nats",
    ),
  )
  # Few values have a lower estimate: lines show that of normal values.
  normal = [
    (entropy.normal(count, options.estimator), f"normal, {count} values")
    for count in dict.fromkeys(rows.values)
    if count >= entropy.LEAST
  ]
  page.add(
    SECTION,
    plots.over_layers(
      "shape",
      "Entropy at deviation 1",
      f"{caption} Without the scale. No distribution has more than a normal "
      f"one, {entropy.GAUSSIAN:.3f}; estimates from few values are lower, by "
      "how much depends on the distribution. The lines are what the estimator "
      "gives of as many normal values.",
      rows.of["shape"],
      "entropy - log deviation, nats",
      lines=tuple(normal),
    ),
  )


def _add_sizes(page: Page, groups: Sequence[SeedGroup], rows: Rows) -> None:
  for key, quantity in (
    ("factors", "activation factor"),
    ("entropy", "entropy, nats"),
  ):
    # Without two sizes there is no figure.
    means = _last_layer(groups, rows, key)
    if means:
      page.add(
        SECTION,
        plots.against(
          f"{key}_sizes",
          f"{quantity.partition(',')[0].capitalize()} against sizes",
          "Means of the last layer over samples, and over seeds with their "
          "deviation; along a line nothing else differs (TransJect, figure "
          f"5). {rows.describe_data()}.",
          means,
          SIZES,
          quantity,
        ),
      )


def _add_parts(page: Page, rows: Rows) -> None:
  page.add(
    SECTION,
    plots.parts(
      "parts",
      "Entropy of heads and experts",
      "Entropy of every head's output before the projection back, and of x + "
      "a F(x) of every expert (TransJect, figure 4b), by the estimator "
      f"{rows.options.estimator!r}. {rows.describe_data()}. Experts share x, "
      "so they differ little; heads have another scale than x.",
      rows.of["parts"],
    ),
  )
  # Only models with experts have gates.
  if rows.of["gates"]:
    page.add(
      SECTION,
      plots.histogram(
        "experts",
        "Weights of the experts",
        "Weight of every sample and expert, by layer (TransJect, figure 6). "
        f"{rows.describe_data()}. The dotted line is 1 / E, the weights at the "
        "start.",
        rows.of["gates"],
        "weight of an expert",
      ),
    )


def _add_tokens(page: Page, rows: Rows) -> None:
  section, text = "Single tokens", rows.describe_texts()
  page.add(
    section,
    plots.pairs(
      "pairs",
      "Distances of pairs of tokens",
      f"Layer by layer (TransJect, figure 1). {text}",
      rows.pairs,
    ),
  )
  page.add(
    section,
    plots.planes(
      "isomap",
      "Tokens in a plane",
      "Isomap of every layer for itself, turned to lie near the one before; "
      f"its width stands above it (TransJect, figure 7). {text}",
      rows.planes,
    ),
  )


def _add_smoothness(page: Page, rows: Rows) -> None:
  section = "Over-smoothing"
  page.add(section, smoothness.figure(rows.of["smooth"], rows.describe_data()))
  page.add(
    section,
    plots.maps(
      "attention",
      "Attention maps",
      "softmax(q k / sqrt e), mean over heads: what softmax attention weighs, "
      "and other mixers with queries and keys would; models without keys are "
      f"left out. {rows.describe_texts()}",
      rows.maps,
    ),
  )
