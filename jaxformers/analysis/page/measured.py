"""Figures of trained models: distances, entropies, tokens and attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers.analysis.evaluation import layers
from jaxformers.analysis.page import texts
from jaxformers.analysis.page.page import Page
from jaxformers.analysis.plotting import figures, plots
from jaxformers.analysis.plotting.figures import Figure, Row, Texts, grouped
from jaxformers.analysis.tables.runs import SIZES, SeedGroup, by_size
from jaxformers.analysis.tokens import curves, entropy, isometry
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table, plus_minus, spread
from jaxformers.inference import load_run
from jaxformers.models.capture import capture, num_tokens, parts
from jaxformers.models.variables import make_variables

# Largest number of each item in a figure:
MOST_PAIRS = 4  # Pairs of tokens with their distances.
MOST_HEADS = 4  # Heads with their attention.
MOST_HEAD_PAIRS = 2  # Pairs of tokens with their distances in each head.
MOST_PATCHES = 256  # Patches of an image with their attention.
MORE_TEXTS = 2  # Test samples whose tokens are drawn in a plane.
# Number of samples, and of their tokens, whose Jacobians are measured.
JACOBIANS = (2, 64)
LEAST_TOKENS = 8  # Smallest number of tokens of a sample that is drawn.
QUANTITIES = (
  "factors",
  "entropy",
  "shape",
  "parts",
  "gates",
  "smooth",
  "isometry",
  "dots",
  "pairs",
  "head_pairs",
  "planes",
  "maps",
  "heads",
)
BOXES = "Boxes: quartiles over samples; whiskers: 5 % and 95 %."


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the measurements of every run.

  Attributes:
    samples: number of examples of the test split.
    length: largest number of tokens per example.
    estimator, axis: options of the entropy, see `entropy.of_tokens`.
    text: sentence for the figures of single tokens; "" for the paper's
      sentence, or for a test sample if the task cannot read that sentence.
    named: tokens or words of the text to name; () for the longest words.
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
    options: options of the measurements.
    of: rows of each quantity in `QUANTITIES`. The last five quantities belong
      to the figures of single tokens.
  """

  def __init__(self, options: Options) -> None:
    self.options = options
    self.of: dict[str, list[Row]] = {name: [] for name in QUANTITIES}
    # Facts for the captions.
    self.values: list[int] = []
    self.finite = 1.0
    self.samples: set[int] = set()
    self.lengths: set[int] = set()
    self.jacobian_samples: set[int] = set()
    self.jacobian_lengths: set[int] = set()
    self.quotes: list[Row] = []
    self.images: list[Row] = []

  def add_model(
    self, label: str, seed: int, run: Any, start: bool
  ) -> list[str]:
    """Adds measurements of the layers of a run; returns notes on missing ones.

    Args:
      label: label of the run in the figures.
      seed: seed of the run.
      run: result of `inference.load_run`.
      start: True to measure the untrained start of the run as well.
    """
    options = self.options
    estimation: dict[str, Any]
    estimation = {"axis": options.axis, "estimator": options.estimator}
    notes: list[str] = []
    # Draw the samples, which are the same before and after training.
    ids = run.sample(options.samples, options.length)
    self.lengths.add(num_tokens(run.model, ids))
    count, length = np.minimum(JACOBIANS, (options.samples, options.length))
    few = run.sample(int(count), int(length))
    self.jacobian_samples.add(len(few))
    self.jacobian_lengths.add(num_tokens(run.model, few))
    # The figures show the untrained start as a separate run.
    states = [(label, run.params)]
    if start and run.start is not None:
      states.append((label + figures.UNTRAINED, run.start))
    for name, params in states:
      measured = layers.measure_layers(run.model, params, ids, **estimation)
      # Collect the facts for the captions.
      self.finite = min(self.finite, float(np.nanmin(measured.finite)))
      self.samples.add(measured.factors.shape[1])
      self.values.append(int(np.median(measured.values)))
      # Layer 0 is the embedding, which has no heads or experts. These are drawn
      # only for the trained model.
      first_layers = {"factors": 0, "dots": 0, "entropy": 0, "shape": 0}
      if name == label:
        first_layers |= {"parts": 1, "gates": 1}
      for key, first_layer in first_layers.items():
        values = getattr(measured, key)
        if values is not None:
          self.of[key] += [
            (name, seed, first_layer + layer, *indices, float(value))
            for (layer, *indices), value in np.ndenumerate(values)
          ]
      # Measure the smoothness and the singular values of the Jacobians.
      smoothness = curves.measure_curves(run.model, params, ids)
      self.of["smooth"] += curves.rows(name, seed, smoothness)
      try:
        spectra = isometry.measure_spectra(run.model, params, few)
      except UserError as error:
        notes.append(f"{name}: no singular values. {error}")
      else:
        self.of["isometry"] += isometry.rows(name, seed, spectra)
    return notes

  def describe_data(self, *, jacobians: bool = False) -> str:
    """Returns the number of samples, tokens and seeds, in words.

    Args:
      jacobians: True for the samples whose Jacobians are measured.
    """
    # Count the seeds of each run, but not of its untrained start.
    seeds = [
      len(grouped(rows, 1))
      for label, rows in grouped(self.of["factors"]).items()
      if not label.endswith(figures.UNTRAINED)
    ]
    counts = (self.samples, self.lengths)
    if jacobians:
      counts = (self.jacobian_samples, self.jacobian_lengths)
    return figures.describe_data(*counts, seeds)

  def describe_inputs(self, *, images: bool = False) -> str:
    """Returns the caption sentence on the inputs of single-token figures.

    Args:
      images: True if the figure also shows images.
    """
    # Name each text once, with the runs that read it.
    quotes = []
    by_quote = grouped(self.quotes + (self.images if images else []))
    for quote, rows in by_quote.items():
      runs = ", ".join(label for _, label in rows)
      quotes.append(f"{quote} ({runs})" if len(by_quote) > 1 else quote)
    return f"Input: {'; '.join(quotes)}. One seed."

  def add_tokens(self, label: str, run: Any) -> None:
    """Adds measurements of the tokens of a text, or of the patches of an image.

    Args:
      label: label of the run in the figures.
      run: result of `inference.load_run`.

    Raises:
      UserError: if the task has neither tokens nor patches, or more than
        `MOST_PATCHES` patches.
    """
    options = self.options
    if run.task.image:
      self._add_image(label, run)
      return
    example = texts.example(run, options.text, options.length)
    ids, names, words, quote = example
    # A model of pairs reads the text twice; only the first copy is drawn.
    if run.model.config.num_inputs > 1:
      ids = np.stack([ids] * run.model.config.num_inputs)
    # Capture the hidden states of this one text.
    variables = make_variables(run.model, run.params)
    captured = capture(run.model, variables, jnp.asarray(ids)[None])
    hidden, mask = layers.tokens(captured)
    # A class token of the encoder comes first.
    if len(mask) > len(names):
      names, words = ["<cls>", *names], ["<cls>", *words]
    named = texts.name_tokens(words, options.named)
    self.quotes.append((quote, label))
    self._add_plane(label, hidden, mask, names, named)
    self._add_samples(label, run, variables)
    # Measure the distances of pairs of the named tokens.
    pairs = list(itertools.combinations(named, 2))[:MOST_PAIRS]
    both = _both_distances(hidden, mask, pairs)
    self.of["pairs"] += [
      (label, f"{names[i]} - {names[j]}", layer, *both[layer, k].tolist())
      for k, (i, j) in enumerate(pairs)
      for layer in range(len(hidden))
    ]
    # Measure the distances of the first pairs in each head or expert.
    each_part = parts(run.model, variables, captured) or ()
    if each_part:
      noun = "head" if captured.gates is None else "expert"
      in_parts = np.array([np.asarray(x[0], np.float64) for x in each_part])
      few = pairs[:MOST_HEAD_PAIRS]
      for number, states in enumerate(np.moveaxis(in_parts, 1, 0), 1):
        part = f"{noun} {number}"
        self._add_part(label, part, states, mask, names, few)
    # Add the attention of every layer.
    maps = curves.maps(captured, run.model.config.is_causal)
    self._add_maps(label, maps, names)

  def _add_part(
    self,
    label: str,
    part: str,
    states: np.ndarray,
    mask: np.ndarray,
    names: Sequence[str],
    pairs: list[tuple[int, int]],
  ) -> None:
    """Adds the distances of pairs of tokens in one head or expert.

    Args:
      label: label of the run.
      part: name of the head or expert.
      states: hidden states of each layer in that part, [l, n, e].
      mask: [n], True at tokens.
      names: names of the tokens.
      pairs: pairs of positions of tokens.
    """
    both = _both_distances(states, mask, pairs)
    self.of["head_pairs"] += [
      (
        f"{label}, {names[i]} - {names[j]}",
        part,
        layer + 1,
        *both[layer, k].tolist(),
      )
      for k, (i, j) in enumerate(pairs)
      for layer in range(len(states))
    ]

  def _add_image(self, label: str, run: Any) -> None:
    """Adds the attention between the patches of one test image."""
    image = run.sample(1, self.options.length)
    mask = np.asarray(run.model.mask(image))[0]
    if len(mask) > MOST_PATCHES + 1:
      raise UserError(
        f"the {len(mask)} patches of {run.task.name} are more than the "
        f"{MOST_PATCHES} whose attention is drawn"
      )
    # Name patches by row and column; a class token may come first.
    height, width = (
      side // run.model.config.patch_size for side in run.task.image[:2]
    )
    names = [f"{row},{column}" for row, column in np.ndindex(height, width)]
    names = ["<cls>"] * (len(mask) - len(names)) + names
    variables = make_variables(run.model, run.params)
    captured = capture(run.model, variables, jnp.asarray(image))
    maps = curves.maps(captured, run.model.config.is_causal)
    # Keep only the layers that are drawn, because an image has many patches.
    drawn = figures.evenly_spaced([*maps], plots.MOST_LAYERS) if maps else ()
    self._add_maps(label, {layer: maps[layer] for layer in drawn}, names)
    quote = f"a test image, {height} x {width} patches named by row and column"
    self.images.append((quote, label))

  def _add_maps(
    self, label: str, maps: Mapping[int, np.ndarray], names: Sequence[str]
  ) -> None:
    """Adds attention matrices, [h, n, n] by the number of the layer."""
    for layer, weights in maps.items():
      # Draw the mean over heads, and the heads if there are several.
      heads = weights[:MOST_HEADS] if len(weights) > 1 else ()
      drawn = [("maps", label, weights.mean(0))]
      drawn += [
        ("heads", f"{label}, head {number}", head)
        for number, head in enumerate(heads, 1)
      ]
      for key, title, matrix in drawn:
        self.of[key] += [
          (title, layer, i, j, names[i], names[j], float(weight))
          for (i, j), weight in np.ndenumerate(matrix)
        ]

  def _add_plane(
    self,
    label: str,
    hidden: Any,
    mask: np.ndarray,
    names: Sequence[str],
    named: Sequence[int],
  ) -> None:
    """Adds the tokens of one text in a plane, layer by layer.

    Args:
      label: label of the run or sample.
      hidden, mask: result of `layers.tokens`.
      names: names of the tokens.
      named: positions of the tokens to name in the figure.
    """
    # `plane` drops padding: point k belongs to the k-th token
    # that is not padding.
    places = np.flatnonzero(mask).tolist()
    self.of["planes"] += [
      (label, layer, place, names[place], int(place in named), *point)
      for layer, points in enumerate(layers.plane(hidden, mask))
      for place, point in zip(places, points.tolist(), strict=True)
    ]

  def _add_samples(self, label: str, run: Any, variables: Any) -> None:
    """Adds the planes of test samples, which are drawn below the text."""
    # Draw more samples than needed, and keep those with enough tokens.
    drawn = texts.samples(run, 8 * MORE_TEXTS, self.options.length)
    long = [sample for sample in drawn if len(sample.ids) >= LEAST_TOKENS]
    for number, sample in enumerate(long[:MORE_TEXTS], 1):
      ids, names, words = sample[:3]
      if run.model.config.num_inputs > 1:
        ids = np.stack([ids] * run.model.config.num_inputs)
      # Capture the hidden states, and name tokens as in `add_tokens`.
      captured = capture(run.model, variables, jnp.asarray(ids)[None])
      hidden, mask = layers.tokens(captured)
      if len(mask) > len(names):
        names, words = ["<cls>", *names], ["<cls>", *words]
      named = texts.name_tokens(words, ())
      title = f"{label}, sample {number}"
      self._add_plane(title, hidden, mask, names, named)


def _both_distances(
  states: np.ndarray, mask: np.ndarray, pairs: list[tuple[int, int]]
) -> np.ndarray:
  """Returns Euclidean and cosine distances of pairs, [l, pairs, 2].

  Args:
    states: hidden states of each layer, [l, n, e].
    mask: [n], True at tokens.
    pairs: pairs of positions of tokens.
  """
  apart = layers.distances(states, mask, pairs)
  return np.stack([apart["euclidean"], apart["cosine"]], -1)


def _correlations(rows: Rows) -> str:
  """Returns the correlation of factor and entropy for each run, in words.

  The correlation is over layers, samples and seeds, without the embedding.
  """
  # Match factors and entropies by (label, seed, layer, sample).
  entropies = {row[:4]: row[4] for row in rows.of["entropy"]}
  described = []
  for label, factors in grouped(rows.of["factors"]).items():
    pairs = [(row[4], entropies[row[:4]]) for row in factors if row[2]]
    values = np.array(pairs).reshape(-1, 2)
    values = values[np.isfinite(values).all(1)]
    # The correlation is undefined without variance.
    varies = len(values) > 1 and (values.std(0) > 0).all()
    if varies and not label.endswith(figures.UNTRAINED):
      described.append(f"{label} {np.corrcoef(values.T)[0, 1]:.2f}")
  return ", ".join(described) or "none"


# Entropies that TransJect prints (section 6), by task and model: of tokens, and
# of heads or experts.
PAPER_ENTROPIES = {
  ("imdb", "transject"): ("-1.3 +- 0.12", "-2.2"),
  ("imdb", "transformer"): ("5.80 +- 0.13", "0.67"),
}
ENTROPY_COLUMNS = (
  "run",
  "entropy, nats",
  "at deviation 1",
  "paper",
  "heads or experts, nats",
  "paper",
)


def _entropy_table(groups: Sequence[SeedGroup], rows: Rows) -> str:
  """Returns the Markdown table of our entropies and the paper's.

  An entropy is a mean over the layers after the embedding. The table has its
  mean and deviation over samples and seeds. Returns "" without measurements.
  """
  # Look up the paper's numbers for each run.
  published = {}
  for group in groups:
    names = (group.config["task"]["name"], group.config["model"]["name"])
    published[group.label] = PAPER_ENTROPIES.get(names, ("", ""))
  # Write a line for each run.
  by_label = {
    key: grouped(rows.of[key]) for key in ("entropy", "shape", "parts")
  }
  lines = []
  for label, entropies in by_label["entropy"].items():
    after = [row for row in entropies if row[2]]
    shapes = [row for row in by_label["shape"][label] if row[2]]
    in_parts = by_label["parts"].get(label, [])
    cells = [_over_samples(values) for values in (after, shapes, in_parts)]
    tokens, heads = published.get(label, ("", ""))
    lines.append((label, *cells[:2], tokens, cells[2], heads))
  return markdown_table(ENTROPY_COLUMNS, lines) if lines else ""


def _over_samples(values: Sequence[Row]) -> str:
  """Returns mean and deviation over samples and seeds, or "" without values.

  Args:
    values: rows (run, seed, layer, ..., sample, value).
  """
  # Average each sample of each seed over the layers.
  by_sample: dict[tuple[int, int], list[float]] = {}
  for row in values:
    if math.isfinite(row[-1]):
      by_sample.setdefault((row[1], row[-2]), []).append(row[-1])
  means = [float(np.mean(of_sample)) for of_sample in by_sample.values()]
  return plus_minus(*spread(means)) if means else ""


def _last_layer(groups: Sequence[SeedGroup], rows: Rows, key: str) -> list[Row]:
  """Returns the mean over samples in the last layer, by size and seed.

  Args:
    groups: runs, grouped by recipe.
    rows: rows of the figures.
    key: quantity, "factors" or "entropy".
  """
  # Rows are (label, seed, layer, sample, value).
  by_label = grouped(rows.of[key])
  means = []
  for line, name, value, group in by_size(groups):
    by_seed = grouped(by_label.get(group.label, ()), 1)
    for seed, seed_rows in by_seed.items():
      last = max(row[2] for row in seed_rows)
      values = [row[4] for row in seed_rows if row[2] == last]
      mean, _ = figures.finite_spread(values)
      means.append((line, seed, name, value, mean))
  return means


def add(
  page: Page,
  groups: Sequence[SeedGroup],
  options: Options,
  pretrained: Sequence[Path] = (),
) -> None:
  """Adds all figures that need checkpoints, and notes on missing figures.

  Args:
    page: page to add to.
    groups: result of `runs.group_by_recipe`.
    options: options of the measurements.
    pretrained: folders of pre-trained models for the figures of single tokens.

  Raises:
    UserError: if a folder in `pretrained` holds no model of texts.
  """
  rows = Rows(options)
  # Open the pre-trained models first, so that a wrong folder fails early.
  opened = [(f.name, texts.open_pretrained(f)) for f in pretrained]
  bar = tqdm(desc="measuring runs", total=sum(len(g.runs) for g in groups))
  for group in groups:
    page.notes += _measure_group(rows, group, bar)
  bar.close()
  # Measure the pre-trained models.
  for name, opened_run in opened:
    try:
      rows.add_tokens(name, opened_run)
    except UserError as error:
      if not groups:
        raise
      page.notes.append(f"{name}: no figure of single tokens; {error}.")
  page.entropies = _entropy_table(groups, rows)
  # Add the figures; the page skips figures without rows.
  layer_figures = _of_layers(rows) + _of_sizes(groups, rows) + _of_parts(rows)
  data = rows.describe_data(jacobians=True)
  layer_figures.append(isometry.figure(rows.of["isometry"], data))
  for section, section_figures in (
    ("Distances and entropy", layer_figures),
    ("Single tokens", _of_tokens(rows)),
    ("Over-smoothing", _of_smoothness(rows)),
  ):
    for figure in section_figures:
      page.add(section, figure)


def _measure_group(rows: Rows, group: SeedGroup, bar: Any) -> list[str]:
  """Measures all seeds of a group, and returns notes on missing figures.

  Args:
    rows: rows to add to.
    group: runs that differ only in the seed.
    bar: progress bar.
  """
  notes = []
  # Draw single tokens and the untrained start only for the first seed.
  first = True
  for record in group.runs:
    bar.update()
    # Note a run that cannot be loaded, and draw the others.
    try:
      run = load_run(record.folder)
      if run.task.objective == "segmentation":
        raise UserError("Segmentation models have no layer figures.")
    except (UserError, OSError) as error:
      notes.append(f"{record.folder}: no figures of its layers. {error}")
      continue
    notes += rows.add_model(group.label, record.seed, run, start=first)
    if not first:
      continue
    first = False
    # Measure the single tokens of the first seed.
    try:
      rows.add_tokens(group.label, run)
    except UserError as error:
      notes.append(f"{group.label}: no figure of single tokens; {error}.")
  return notes


def _layer_captions(rows: Rows) -> tuple[str, str, str, str]:
  """Returns the captions of the four figures of `_of_layers`."""
  # Describe data and values in sentences that several captions share.
  estimator, data = rows.options.estimator, rows.describe_data()
  values = {
    "units": "one token over its units",
    "tokens": "one unit over a sample's tokens",
  }[rows.options.axis]
  start = f"{data}, and the untrained start of the first seed. {BOXES}"
  factors = (
    "Distance |x_i - x_j| of two tokens of a sample after a layer, divided by "
    "their distance in the embedding; mean over pairs (TransJect, equation 9). "
    f"{start} The factor is exactly 1 for an untrained TransJect, whose alpha "
    "is 0. It is also near 1 for random rotations, so a value near 1 is no "
    "evidence of learning."
  )
  dots = (
    "Dot product x_i . x_j of two tokens of a sample after a layer, divided by "
    "their dot product in the embedding; median over pairs (TransJect, section "
    f"6). {start} The mean does not exist, because dot products of embeddings "
    "may be near 0, and have both signs."
  )
  entropies = (
    f"Differential entropy of the values of {values}, by the estimator "
    f"{estimator!r}, mean over a sample. {start} In every layer at least "
    f"{100 * rows.finite:.0f} % of the entropies are finite and averaged; the "
    "others have too many equal values."
  )
  correlation = (
    f"{entropies} Correlation with the activation factor: "
    f"{_correlations(rows)}."
  )
  shapes = (
    f"{entropies} The values are scaled to deviation 1. Among all "
    "distributions of deviation 1, the normal distribution has the largest "
    f"entropy, {entropy.GAUSSIAN:.3f}. "
    "Estimates from few values are biased low, and the bias depends on the "
    "distribution. The lines show the estimate from the same number of normal "
    "values."
  )
  return factors, dots, correlation, shapes


def _of_layers(rows: Rows) -> list[Figure]:
  """Returns the figures of activation factors and of entropies."""
  estimator = rows.options.estimator
  factors, dots, correlation, shapes = _layer_captions(rows)
  # Mark the estimate from the same number of normal values, because estimates
  # from few values are biased low.
  normal = [
    (entropy.normal(count, estimator), f"normal, {count} values")
    for count in dict.fromkeys(rows.values)
    if count >= entropy.LEAST
  ]
  return [
    plots.over_layers(
      Texts("activation_factors", "Activation factors", factors),
      rows.of["factors"],
      "activation factor",
      lines=[(1.0, "distances kept")],
      ratio=True,
    ),
    plots.over_layers(
      Texts("dot_factors", "Activation factors of dot products", dots),
      rows.of["dots"],
      "dot product over the embedding's",
      lines=[(1.0, "dot products kept")],
    ),
    plots.over_layers(
      Texts("entropy", "Entropy", correlation),
      rows.of["entropy"],
      "entropy, nats",
    ),
    plots.over_layers(
      Texts("shape", "Entropy at deviation 1", shapes),
      rows.of["shape"],
      "entropy - log deviation, nats",
      lines=normal,
    ),
  ]


def _of_sizes(groups: Sequence[SeedGroup], rows: Rows) -> list[Figure]:
  """Returns the figures over the sizes of the model.

  The figures have no rows if the runs do not differ in a size.
  """
  caption = (
    "Mean over samples in the last layer; mean and deviation over seeds. The "
    "runs of a line differ only in the size (TransJect, figure 5). "
    f"{rows.describe_data()}."
  )
  return [
    plots.against(
      Texts(f"{key}_sizes", f"{noun.capitalize()} against sizes", caption),
      _last_layer(groups, rows, key),
      SIZES,
      noun + unit,
    )
    for key, noun, unit in (
      ("factors", "activation factor", ""),
      ("entropy", "entropy", ", nats"),
    )
  ]


def _of_parts(rows: Rows) -> list[Figure]:
  """Returns the figures of heads and experts."""
  data = rows.describe_data()
  entropies = (
    "Entropy of the output of every head before the output projection, and of "
    "x + a F(x) of every expert (TransJect, figure 4b), by the estimator "
    f"{rows.options.estimator!r}. {data}. Experts differ little, because they "
    "share x. Heads have another scale than x."
  )
  weights = (
    "Weights of the experts for every sample, by layer (TransJect, figure 6). "
    f"{data}. The dotted line is 1 / E, the weight before training."
  )
  return [
    plots.parts(
      Texts("parts", "Entropy of heads and experts", entropies),
      rows.of["parts"],
    ),
    plots.histogram(
      Texts("experts", "Weights of the experts", weights),
      rows.of["gates"],
      "weight of an expert",
    ),
  ]


def _of_tokens(rows: Rows) -> list[Figure]:
  """Returns the figures of single tokens: distances, and planes."""
  text = rows.describe_inputs()
  distances = (
    "Distances layer by layer (TransJect, figure 1). A horizontal line "
    f"means that the distance is kept. {text}"
  )
  planes = (
    "Each layer has its own Isomap, rotated to match the one before; "
    "the title of a panel gives its width (TransJect, figure 7). Tokens "
    "that keep their neighbours keep their places. Below the text of each "
    f"run are the beginnings of {MORE_TEXTS} test samples. {text}"
  )
  in_parts = (
    "Distances of the first pairs in the output of each head before the output "
    f"projection, or of each expert (TransJect, figure 1). {text}"
  )
  pairs = Texts("pairs", "Distances of pairs of tokens", distances)
  head_pairs = Texts("head_pairs", "Distances inside each head", in_parts)
  isomap = Texts("isomap", "Tokens in a plane", planes)
  return [
    plots.pairs(pairs, rows.of["pairs"]),
    plots.pairs(head_pairs, rows.of["head_pairs"]),
    plots.planes(isomap, rows.of["planes"]),
  ]


def _of_smoothness(rows: Rows) -> list[Figure]:
  """Returns the figures of over-smoothing and of attention."""
  mean, each = (
    f"softmax(q k / sqrt e), {what}. These are the weights of softmax "
    "attention; other mixers with queries and keys are drawn as if they used "
    "softmax attention, and models without keys are left out. A bright column "
    f"is a token that all others read. {rows.describe_inputs(images=True)}"
    for what in ("mean over heads", f"head by head, at most {MOST_HEADS}")
  )
  heads = Texts("attention_heads", "Softmax of queries and keys, by head", each)
  return [
    curves.figure(rows.of["smooth"], rows.describe_data()),
    plots.maps(
      Texts("attention", "Softmax of queries and keys", mean), rows.of["maps"]
    ),
    plots.maps(heads, rows.of["heads"]),
  ]
