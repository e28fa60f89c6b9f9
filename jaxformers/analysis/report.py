r"""One page with the tables and figures of any runs.

python -m jaxformers.analysis.report runs/transject runs/local --out report

Writes report/index.html, which needs no server and no network, and every figure
beside it as PNG, SVG and CSV. A WORKDIR is a run, or has runs below it; runs
that differ in the seed alone are one line with a deviation. What cannot be
drawn is named on the page with the reason, and the rest is drawn.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformers import config as configs
from jaxformers.analysis import (
  depth,
  entropy,
  figures,
  layers,
  published,
  smoothness,
)
from jaxformers.analysis import results as tables
from jaxformers.analysis.capture import capture, variables
from jaxformers.analysis.figures import Figure
from jaxformers.registry import choose

TEXT = "This movie is terrible but it has some good effects."
UNKNOWN = ("<unk>", "[UNK]")
SHORT = 32  # Tokens of a text that are drawn one by one, at most.
# What a results.json has, whatever wrote it.
RESULTS = (
  *("task", "protocol", "model", "seed", "config", "max_len", "parameters"),
  *("parameter_ratio", "baselines", "data", "selection", "train_seconds"),
)
# What a label leaves out: it says nothing of a model, or all have it.
SILENT = (*configs.FREE, "reference.", "seed")


@dataclasses.dataclass(frozen=True)
class One:
  """A run.

  Attributes:
    folder: its workdir.
    config: as in `config.json`.
    results: as in `results.json`; {} if it has not ended.
  """

  folder: Path
  config: Mapping[str, Any]
  results: Mapping[str, Any]

  @property
  def seed(self) -> int:
    """Of the run."""
    return int(self.config["seed"])

  def metrics(self) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`; the last may be cut short."""
    path = self.folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
      try:
        found = json.loads(line)
      except json.JSONDecodeError:
        return
      if isinstance(found, dict) and "step" in found:
        yield found


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ in the seed alone.

  Attributes:
    label: what tells it from the others.
    runs: in the order of their seeds.
  """

  label: str
  runs: tuple[One, ...]

  @property
  def config(self) -> Mapping[str, Any]:
    """Of the first."""
    return self.runs[0].config


@dataclasses.dataclass
class Page:
  """What is on the page.

  Attributes:
    figures: in the order of the page, by the title of their section.
    notes: what is left out, and why.
    rows: of the table of results.
    speeds: parameters and speed of every line, see `speeds`.
    papers: of `published.tables`: the papers' tables with our runs in them.
  """

  figures: dict[str, list[Figure]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  speeds: str = ""
  papers: dict[str, Any] = dataclasses.field(default_factory=dict)

  def add(self, section: str, figure: Figure | None) -> None:
    """Puts a figure at the end of a section; one without numbers is noted."""
    if figure is None or not figure.rows:
      return
    if all(_void(row[-1]) for row in figure.rows):
      self.notes.append(f"{figure.title}: there is no number to draw.")
      return
    self.figures.setdefault(section, []).append(figure)


def _void(value: Any) -> bool:
  return isinstance(value, float) and not math.isfinite(value)


def discover(workdirs: Iterable[Path]) -> tuple[list[One], list[str]]:
  """All runs in some folders and below, and what is wrong with the folders."""
  found: dict[Path, One] = {}
  notes = []
  for workdir in workdirs:
    paths = sorted(
      {
        path.parent
        for name in ("config", "results")
        for path in tables.files(workdir, f"{name}.json")
      }
    )
    own = []
    for folder in paths:
      try:
        own.append(_read(folder))
      except (ValueError, KeyError, TypeError) as error:
        notes.append(f"{folder} is no run of this package: {error}")
    if not own:
      notes.append(f"{workdir}: there is no run in it or below it.")
    found |= {one.folder.resolve(): one for one in own}
  return list(found.values()), notes


def _read(folder: Path) -> One:
  content: dict[str, Any] = {}
  for name in ("config", "results"):
    path = folder / f"{name}.json"
    content[name] = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(content[name], Mapping):
      raise ValueError(f"{name}.json is no table of names and values")
  results = content["results"]
  config = content["config"] or results.get("config", {})
  for key, kind in (("seed", int), ("task", Mapping), ("model", Mapping)):
    if not isinstance(config.get(key), kind):
      raise ValueError(f"its config has no {key!r}")
  for key in ("task", "model"):
    if "name" not in config[key]:
      raise ValueError(f"its config has no name of the {key}")
  missing = [key for key in RESULTS if results and key not in results]
  if missing:
    raise ValueError(f"its results.json has no {', '.join(missing)}")
  return One(folder, config, results)


def groups(runs: Sequence[One]) -> list[Group]:
  """Runs by recipe; labels name the model and what else differs.

  Of two with one recipe and one seed the one that has ended counts, or else the
  first. What data a run that has not ended is of is not known: it counts to the
  others of its config.
  """
  by: dict[str, dict[int, One]] = {}
  known: dict[str, str] = {}
  for one in sorted(runs, key=lambda one: not one.results):
    own = {"config": one.config}
    config = tables.recipe(own)
    about = one.results.get("task_description")
    key = tables.recipe({**own, "task_description": about})
    if not one.results:
      key = known.get(config, key)
    known.setdefault(config, key)
    by.setdefault(key, {}).setdefault(one.seed, one)
  recipes = [tuple(v for _, v in sorted(own.items())) for own in by.values()]
  flat = [
    {
      k: v
      for k, v in configs.flatten(own[0].config).items()
      if not k.startswith(SILENT)
    }
    for own in recipes
  ]
  several = len({own["task.name"] for own in flat}) > 1

  def names(own: Mapping[str, Any], count: int) -> str:
    """The model, and so many of what differs from runs of it, sizes first."""
    name = str(own["model.name"])
    if several:
      name = f"{own['task.name']} {name}"
    rest = [
      other
      for other in flat
      if (other["model.name"], other["task.name"])
      == (own["model.name"], own["task.name"])
    ]
    keys = [k for k in own if len({str(o.get(k)) for o in rest}) > 1]
    keys.sort(key=lambda k: (not k.startswith("model."), k))
    told = [f"{k.rpartition('.')[2]}={own[k]}" for k in keys[:count]]
    return ", ".join([name, *told])

  labels = [names(own, 3) for own in flat]
  twice = {label for label in labels if labels.count(label) > 1}
  for k, own in enumerate(flat):
    if labels[k] in twice:
      labels[k] = names(own, len(own))
  twice = {label for label in labels if labels.count(label) > 1}
  for k, label in enumerate(labels):  # They differ in what is silent.
    if label in twice:
      labels[k] = f"{label} ({recipes[k][0].folder})"
  return [Group(label, own) for label, own in zip(labels, recipes, strict=True)]


def training(found: Sequence[Group]) -> Figure:
  """Loss, and the score on the selection split, over steps."""
  rows = []
  names: dict[str, str] = {}
  for group in found:
    for one in group.runs:
      for line in one.metrics():
        for key, value in line.items():
          split, slash, metric = key.partition("/")
          if not slash or value is None:
            continue
          unit = ", nats" if metric == "loss" else ""
          names[key] = f"{metric.replace('_', ' ')} on {split}{unit}"
          rows.append((group.label, one.seed, key, line["step"], value))
  wanted = sorted(names, key=lambda k: (not k.endswith("loss"), k))[:6]
  kept = [row for row in rows if row[2] in wanted]
  return figures.curves(
    "training",
    "Training curves",
    "Means over log_steps steps for train, over the whole split elsewhere; "
    f"bands are one deviation over seeds ({_seeds(found)}). Of more than six "
    "quantities the first six are drawn.",
    kept,
    "step",
    {key: names[key] for key in wanted},
    markers=False,
  )


def _seeds(found: Sequence[Group]) -> str:
  counts = {len(group.runs) for group in found}
  few, many = min(counts), max(counts)
  if many == 1:
    return "one seed: no deviation"
  return f"{few} seeds" if few == many else f"{few} to {many} seeds"


SIZES = {
  "num_layers": "layers",
  "d_model": "width d",
  "num_experts": "experts",
}


def sizes(found: Sequence[Group]) -> Figure | None:
  """Test score against depth, width and experts (TransJect, figure 3).

  None if no two runs of one model and task differ in them.
  """
  found = [group for group in found if any(one.results for one in group.runs)]
  metrics = [_score(one)[0] for g in found for one in g.runs if one.results]
  metric = max(metrics, key=metrics.count) if metrics else ""
  rows = [
    (line, one.seed, name, value, _score(one)[1])
    for line, name, value, group in _by_size(found)
    for one in group.runs
    if one.results and _score(one)[0] == metric
  ]
  if not rows:
    return None
  return figures.against(
    "sizes",
    "Score against the size of the model",
    f"On test, mean and deviation over seeds ({_seeds(found)}); along a line "
    "nothing else differs.",
    rows,
    SIZES,
    metric,
  )


def _by_size(found: Sequence[Group]) -> Iterator[tuple[str, str, int, Group]]:
  """(line, size, value, run) where along a line a size alone differs."""
  for (task, model), own in _by_model(found).items():
    for name in SIZES:
      lines: dict[str, list[tuple[int, Group]]] = {}
      for group in own:
        shape = _sizes(group.config)
        if name in shape:
          rest = ", ".join(f"{k}={v}" for k, v in shape.items() if k != name)
          key = f"{task} {model} ({rest}){_others(group, own)}"
          lines.setdefault(key, []).append((shape[name], group))
      for key, places in lines.items():
        if len({value for value, _ in places}) > 1:
          yield from ((key, name, value, group) for value, group in places)


def _correlations(rows: _Rows) -> str:
  """Of every run, over layers, samples and seeds, in words."""
  entropies = {row[:4]: row[4] for row in rows.of["entropy"]}
  told = []
  for label, own in figures.grouped(rows.of["factors"]).items():
    both = np.array([(row[4], entropies[row[:4]]) for row in own if row[2]])
    both = both[np.isfinite(both).all(1)]
    if len(both) > 1 and (both.std(0) > 0).all():
      told.append(f"{label} {np.corrcoef(both.T)[0, 1]:.2f}")
  return ", ".join(told) or "none"


def _at_the_end(
  found: Sequence[Group], rows: _Rows, key: str
) -> list[figures.Row]:
  """A quantity of the last layer against sizes, a mean over samples a seed."""
  measured = figures.grouped(rows.of[key])
  made = []
  for line, name, value, group in _by_size(found):
    for seed, own in figures.grouped(measured.get(group.label, ()), 1).items():
      last = figures.grouped(own, 2)
      mean, _ = figures.spread([row[4] for row in last[max(last)]])
      made.append((line, seed, name, value, mean))
  return made


def _others(group: Group, own: Sequence[Group]) -> str:
  """What differs between runs of a model beside its sizes; "" for nothing."""
  flat = [configs.flatten(other.config) for other in own]
  mine = configs.flatten(group.config)
  sized = (*SIZES, "mlp_dim", "scale", "init_std")
  keys = [
    k
    for k in mine
    if not k.startswith(SILENT)
    and k.rpartition(".")[2] not in sized
    and len({str(f.get(k)) for f in flat}) > 1
  ]
  return "".join(f", {k.rpartition('.')[2]}={mine[k]}" for k in sorted(keys))


def speeds(found: Sequence[Group]) -> str:
  """Parameters and speed of every line (TransJect, table 3), in Markdown.

  Examples a second are the median over the logged stretches of all seeds; ""
  if no run has ended.
  """
  lines = []
  for group in found:
    ended = [one for one in group.runs if one.results]
    logged = [
      line["examples_per_second"]
      for one in ended
      for line in one.metrics()
      if "examples_per_second" in line
    ]
    if not ended:
      continue
    r = ended[0].results
    hardware = r.get("hardware", {})
    where = f"{hardware.get('devices', '?')} {hardware.get('device_kind', '?')}"
    cells = (
      group.label,
      f"{r['parameters']:,}",
      f"{r['parameter_ratio']:.2f}",
      f"{statistics.median(logged):.4g}" if logged else "",
      where,
    )
    lines.append(f"| {' | '.join(cells)} |")
  if not lines:
    return ""
  head = "| run | parameters | x Transformer | examples/s in training | on |"
  return "\n".join([head, "| --- | --- | --- | --- | --- |", *lines])


def _by_model(
  found: Sequence[Group],
) -> dict[tuple[str, str], list[Group]]:
  by: dict[tuple[str, str], list[Group]] = {}
  for group in found:
    key = (group.config["task"]["name"], group.config["model"]["name"])
    by.setdefault(key, []).append(group)
  return by


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
  model = config["model"]
  known = {**model, **model.get("mixer", {})}
  return {name: known[name] for name in SIZES if name in known}


def _score(one: One) -> tuple[str, float]:
  metric = one.results.get("metric", "accuracy")
  scale = 1 if metric in tables.LOWER else 100
  return tables.TITLES[metric], scale * one.results[metric]


def deep(found: Sequence[Group]) -> Figure | None:
  """Loss against parameters per depth (Levine et al. 2020, figure 2).

  None if there are no language models of two depths.
  """
  runs = [
    one.results
    for group in found
    for one in group.runs
    if one.results.get("metric") == "perplexity"
  ]
  if len({run["config"]["model"]["num_layers"] for run in runs}) < 2:
    return None
  return depth.figure(depth.points(runs))


@dataclasses.dataclass(frozen=True)
class Options:
  """What is measured of every run.

  Attributes:
    samples: examples of the test split.
    length: tokens of each at most.
    estimator, axis: of the entropy.
    text: a sentence for the figures of single tokens; "" for the paper's, or
      where that is no text of the task for the first test sample, cut short.
    named: tokens of it to name; () for the longest.
  """

  samples: int = 32
  length: int = 512
  estimator: str = "vasicek"
  axis: str = "units"
  text: str = ""
  named: tuple[str, ...] = ()


class _Rows:
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
    self.quoted: dict[str, str] = {}

  def model(self, label: str, seed: int, run: Any, start: bool) -> None:
    """Distributions and curves of a run, and of its untrained start."""
    o = self.options
    ids = run.sample(o.samples, o.length)
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
        if trained or key != "factors":
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
    """How many samples and seeds there are, in words."""
    runs = {row[:2] for row in self.of["factors"]}
    seeds = [
      sum(run == name for run, _ in runs) for name in {r for r, _ in runs}
    ]
    few, many = (f(seeds, default=0) for f in (min, max))
    counted = f"{few}" if few == many else f"{few} to {many}"
    samples = " or ".join(str(n) for n in sorted(self.samples))
    return (
      f"{samples} test samples of at most {self.options.length} tokens, "
      f"{counted} seed{'s' if many != 1 else ''}"
    )

  def texts(self) -> str:
    """What single tokens are of, in words."""
    by = figures.grouped([(text, label) for label, text in self.quoted.items()])
    told = []
    for text, own in by.items():
      whose = ", ".join(row[1] for row in own)
      told.append(repr(text) + (f" ({whose})" if len(by) > 1 else ""))
    return f"Of {'; of '.join(told)}, one seed."

  def tokens(self, label: str, run: Any) -> None:
    """Single tokens of one text; ValueError if the task has no tokens."""
    ids, names = example(run, self.options)
    names = [readable(name) for name in names]
    quoted = " ".join(names)
    if run.model.num_inputs > 1:  # The same twice: the first is looked at.
      ids = np.stack([ids] * run.model.num_inputs)
    given = variables(run.model, run.params)
    seen = capture(run.model, given, jnp.asarray(ids)[None])
    hidden, mask = layers.tokens(seen)
    if len(mask) > len(names):  # A token of the encoder's own stands first.
      names = ["<cls>", *names]
    chosen = name_tokens(names, self.options.named)
    around = layers.plane(hidden, mask)
    self.quoted[label] = quoted
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


def example(run: Any, options: Options) -> tuple[np.ndarray, list[str]]:
  """Ids of the text whose tokens are drawn, and what each stands for.

  Raises:
    ValueError: for a task without tokens, or a text that is given and has fewer
      than four in the task's vocabulary.
  """
  task = run.task
  if task.image or not task.vocabulary:
    raise ValueError(f"the inputs of {task.name} are no tokens")
  length = min(options.length, SHORT)
  try:
    ids = task.encode(options.text or TEXT, length)
    names = [task.vocabulary[k] for k in ids]
    known = sum(name not in UNKNOWN for name in names)
    if known < 4:
      raise ValueError(
        f"{options.text or TEXT!r} has {known} tokens in the vocabulary of "
        f"{task.name}: give another with --text"
      )
  except ValueError:
    if options.text:
      raise
    ids = run.sample(1, length)[0]
    ids = ids[0] if ids.ndim > 1 else ids  # Of a pair the first.
    ids = ids[ids > 0]
    names = [task.vocabulary[k] for k in ids]
  return ids, names


def readable(name: str) -> str:
  """A token as one reads it: a byte as its character, a piece without marks."""
  if re.fullmatch("0x[0-9a-f]{2}", name) and chr(int(name, 16)).isprintable():
    name = chr(int(name, 16))
  bare = name.removeprefix("\u0120").removeprefix("##").removesuffix("</w>")
  return {"\u010a": "newline", "": "space", " ": "space"}.get(bare, bare)


def name_tokens(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
  """Places of the tokens to name: the wanted ones, or the longest words.

  Raises:
    ValueError: for a wanted token that is not there.
  """
  for name in wanted:
    if name not in names:
      raise ValueError(f"the token {name!r} is not among {' '.join(names)}")
  if wanted:
    return sorted({names.index(name) for name in wanted})
  words = {
    name: k
    for k, name in reversed([*enumerate(names)])
    if re.fullmatch(r"\w+", name)
  }
  if len(words) < 4:
    words = {f"{name} {k}": k for k, name in enumerate(names)}
  return sorted(sorted(words.values(), key=lambda k: -len(names[k]))[:4])


def model_figures(page: Page, found: Sequence[Group], options: Options) -> None:
  """All figures that need checkpoints; what has none is noted."""
  from jaxformers.analysis import trained

  rows = _Rows(options)
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
  page: Page, found: Sequence[Group], rows: _Rows, options: Options
) -> None:
  o, section = options, "Distances and entropy"
  data = rows.data()
  boxes = "Boxes: quartiles over samples; whiskers: 5 % and 95 %."
  page.add(
    section,
    figures.over_layers(
      "activation_factors",
      "Activation factors",
      "Mean over pairs of tokens of a sample of |x_i - x_j| after a layer over "
      f"that of the embedding (TransJect, equation 9). {data}. {boxes} Exactly "
      "1 at TransJect's start; near 1 for random rotations as well.",
      rows.of["factors"],
      "activation factor",
      lines=((1.0, "distances kept"),),
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
        " Without the scale. No distribution has more than a normal one: the "
        "lines are what the estimator gives of as many values of one, which "
        f"of few is less than the true {entropy.GAUSSIAN:.3f}."
      )
    )
    normal = [
      (entropy.normal(count, o.estimator), f"{count} normal values")
      for count in dict.fromkeys(rows.values)
      if count >= entropy.LEAST
    ]
    page.add(
      section,
      figures.over_layers(
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
        figures.against(
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
    figures.parts(
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
      figures.histogram(
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
    figures.pairs(
      "pairs",
      "Distances of pairs of tokens",
      f"Layer by layer (TransJect, figure 1). {quoted}",
      rows.pairs,
    ),
  )
  page.add(
    section,
    figures.planes(
      "isomap",
      "Tokens in a plane",
      "Isomap of every layer for itself, turned to lie near the one before; "
      f"its width stands above it (TransJect, figure 7). {quoted}",
      rows.planes,
    ),
  )


def _smooth(page: Page, rows: _Rows) -> None:
  section = "Over-smoothing"
  page.add(
    section,
    smoothness.figure(
      rows.of["smooth"],
      f"{rows.data()}; bands are one deviation over seeds. J and what follows "
      "it need queries, keys and values (docs/mixers.md).",
    ),
  )
  page.add(
    section,
    figures.maps(
      "attention",
      "Attention maps",
      "softmax(q k / sqrt e), mean over heads: what softmax attention weighs, "
      "and other mixers with queries and keys would; models without keys are "
      f"left out. {rows.texts()}",
      rows.maps,
    ),
  )


def build(
  workdirs: Sequence[Path], options: Options, *, checkpoints: bool = True
) -> Page:
  """The page of some folders.

  Args:
    workdirs: runs, or folders with runs below.
    options: of the measurements.
    checkpoints: whether models are loaded; without, tables and curves alone.

  Raises:
    ValueError: if there is no run at all, with what is wrong.
  """
  runs, notes = discover(workdirs)
  if not runs:
    raise ValueError("\n".join([*notes, "Give the workdirs of runs."]))
  found = groups(runs)
  page = Page(notes=notes)
  kept = [one for group in found for one in group.runs]
  ended = [one.results for one in kept if one.results]
  page.notes += [
    f"{one.folder} is of a recipe and a seed that another run has, too."
    for one in runs
    if not any(one is other for other in kept)
  ]
  page.notes += [
    f"{one.folder} has no results.json: it has not ended, and is not in the "
    "table."
    for one in runs
    if not one.results
  ]
  page.rows = tables.summarise(ended)
  page.speeds = speeds(found)
  page.papers = published.tables(ended)
  page.add("Training", training(found))
  page.add("Training", sizes(found))
  try:
    page.add("Depth and width", deep(found))
  except ValueError as error:
    page.notes.append(f"No figure of depth against width: {error}")
  if checkpoints:
    model_figures(page, found, options)
  return page


def write(page: Page, out: Path) -> Path:
  """index.html and the files of every figure; the path of the page."""
  out.mkdir(parents=True, exist_ok=True)
  for one in itertools.chain(*page.figures.values()):
    one.write(out)
  if page.rows:
    (out / "results.md").write_text(tables.markdown(page.rows) + "\n")
  for title, (tasks, own) in page.papers.items():
    name = _file(title)
    for kind, form in (("md", published.markdown), ("tex", published.latex)):
      (out / f"{name}.{kind}").write_text(form(own, tasks) + "\n")
  path = out / "index.html"
  path.write_text(_html(page, out), encoding="utf-8")
  return path


CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
  max-width: 64rem; color: #111; background: #fff;
  overflow-wrap: anywhere; }
table { overflow-wrap: normal; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
figure { margin: 1.5rem 0; break-inside: avoid; }
figure img { width: 100%; height: auto; }
figcaption { font-size: .875rem; color: #333; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .75rem .25rem 0;
  text-align: left; vertical-align: top; }
@media print { nav { display: none; } body { max-width: none; } }
"""


def _html(page: Page, out: Path) -> str:
  def text(value: object) -> str:
    return html.escape(str(value))

  sections = ["Results", *page.figures, *(["Left out"] if page.notes else [])]
  links = "".join(
    f'<a href="#s{k}">{text(name)}</a>' for k, name in enumerate(sections)
  )
  parts = [
    '<!doctype html><html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    '<link rel="icon" href="data:,">',
    f"<title>jaxformers: report</title><style>{CSS}</style></head><body>",
    f"<h1>Report of runs</h1><nav>{links}</nav>",
    '<h2 id="s0">Results</h2>',
    *_tables(page.rows),
    *(_blocks(page.speeds) if page.speeds else ()),
    *_papers(page.papers),
  ]
  for k, (name, own) in enumerate(page.figures.items(), 1):
    parts.append(f'<h2 id="s{k}">{text(name)}</h2>')
    for one in own:
      picture = (out / f"{one.name}.svg").read_bytes()
      data = base64.b64encode(picture).decode()
      files = ", ".join(
        f'<a href="{one.name}.{kind}">{kind.upper()}</a>'
        for kind in ("png", "svg", "csv")
      )
      wide = round(110 * one.size[0])  # Pixels: a little above its size.
      parts.append(
        f'<figure id="{one.name}"><h3>{text(one.title)}</h3>'
        f'<img alt="{text(one.title)}" style="max-width:{wide}px" '
        f'src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text(one.caption)} {files}</figcaption></figure>"
      )
  if page.notes:
    items = "".join(f"<li>{text(note)}</li>" for note in page.notes)
    parts.append(f'<h2 id="s{len(sections) - 1}">Left out</h2><ul>{items}</ul>')
  return "\n".join([*parts, "</body></html>\n"])


def _file(title: str) -> str:
  """ "Table 1, ..." is kept in table_1."""
  return "table_" + re.sub(r"\D", "", title)


def _papers(papers: Mapping[str, Any]) -> list[str]:
  found = []
  for title, (tasks, own) in papers.items():
    name = _file(title)
    files = ", ".join(
      f'<a href="{name}.{kind}">{kind.upper()}</a>' for kind in ("md", "tex")
    )
    found += [
      f"<h3>TransJect, {html.escape(title)}</h3>",
      *_blocks(published.markdown(own, tasks)),
      "<p>Accuracy on test in percent; in brackets ours less theirs, in points "
      "and in standard errors of our seeds and of as many examples. Mind sizes "
      f"and protocol. {files}</p>",
    ]
  return found


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  if not rows:
    return ["<p>No run has ended.</p>"]
  return [
    *_blocks(tables.markdown(rows)),
    "<p>Mean and sample deviation over seeds, on the test split, of the "
    "checkpoint chosen on the split that is named. Trivial: rules without a "
    "model.</p>",
  ]


def _blocks(markdown: str) -> list[str]:
  """Tables in Markdown as HTML."""
  found = []
  for block in markdown.split("\n\n"):
    lines = [
      [cell.strip() for cell in line.strip("|").split("|")]
      for line in block.splitlines()
    ]
    head, body = lines[0], lines[2:]
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    out = [f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>']
    for line in body:
      cells = "".join(
        f"<td>{html.escape(cell).replace('+-', '±')}</td>" for cell in line
      )
      out.append(f"<tr>{cells}</tr>")
    found.append("".join([*out, "</tbody></table></div>"]))
  return found


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; a mistake ends in one message."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxformers.analysis.report",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR")
  parser.add_argument("--out", type=Path, default=Path("report"))
  parser.add_argument("--samples", type=int, default=32, help="of the test")
  parser.add_argument("--length", type=int, default=512, help="tokens at most")
  parser.add_argument(
    "--estimator", default="vasicek", help=", ".join(entropy.ESTIMATORS)
  )
  parser.add_argument("--axis", default="units", help=", ".join(entropy.AXES))
  parser.add_argument(
    "--text", default="", help=f"for single tokens; default {TEXT!r}"
  )
  parser.add_argument("--tokens", default="", help="of it, to name: a,b")
  parser.add_argument(
    "--no_checkpoints", action="store_true", help="tables and curves alone"
  )
  args = parser.parse_args(argv)
  try:
    choose("estimator", args.estimator, entropy.ESTIMATORS)
    choose("axis", args.axis, entropy.AXES)
    if args.samples < 1 or args.length < 1:
      raise ValueError(
        f"--samples={args.samples} --length={args.length}: at least 1 each."
      )
    named = tuple(name for name in args.tokens.split(",") if name)
    options = Options(
      args.samples, args.length, args.estimator, args.axis, args.text, named
    )
    # Before anything is measured.
    args.out.mkdir(parents=True, exist_ok=True)
    page = build(args.workdirs, options, checkpoints=not args.no_checkpoints)
    path = write(page, args.out)
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  if page.rows:
    print(tables.markdown(page.rows))
  for note in page.notes:
    print(f"Left out: {note}")
  print(f"Written to {path}.")


if __name__ == "__main__":
  main()
