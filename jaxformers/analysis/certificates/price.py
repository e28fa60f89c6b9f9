"""Test scores of runs, plotted over the width of their certificates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers.analysis.certificates import lipschitz
from jaxformers.analysis.plotting import figures
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.foundations import workdirs
from jaxformers.foundations.tables import markdown_table
from jaxformers.inference import load_run
from jaxformers.models.blocks.invertible import layers_of, shared_by_all
from jaxformers.models.variables import make_variables, of_stack


class Priced(NamedTuple):
  """Score and certificate of a run.

  Attributes:
    name: name of the run's folder.
    model: name of the model.
    metric: name of the score.
    score: test score; accuracies are shares.
    interval: smallest and largest factor by which the encoder may change the
      distance of two sequences; None if no factor holds for all sequences.
  """

  name: str
  model: str
  metric: str
  score: float
  interval: tuple[float, float] | None

  @property
  def width(self) -> float:
    """Log10 of the largest over the smallest factor; NaN without interval."""
    if self.interval is None:
      return math.nan
    low, high = self.interval
    return math.log10(high / low)


def find_interval(model: Any, params: Any) -> tuple[float, float] | None:
  """Returns the certified factors of an encoder for two sequences, or None.

  The result is None if the encoder has no certificate, or if the bound of its
  layers depends on the data, as TransJect's does with eigenvalues or the
  paper's gate.

  Args:
    model, params: model and its parameters.
  """
  block = model.stacks()["encoder"]
  layers = layers_of(block)
  if layers is None or block.final_norm:
    return None
  # Layers without a bound have no certificate for all sequences.
  encoder = of_stack(make_variables(model, params), "encoder")
  shared = shared_by_all(layers, encoder, model.config.d_model)
  if layers.bound(layers.weights(encoder)[0], shared) is None:
    return None
  # A bound for all sequences does not depend on the norms: pass ones.
  rows = lipschitz.guaranteed(
    model, params, shared, [1.0] * model.config.num_layers
  )
  return lipschitz.product([row["sequences"] for row in rows])


def price(workdir: Path) -> Priced:
  """Returns the certificate and the score of a run.

  Raises:
    UserError: if `inference.load_run` fails, or if the run has not ended.
  """
  run = load_run(workdir)
  results = workdirs.read_results(workdir)
  metric = results["metric"]
  interval = find_interval(run.model, run.params)
  name = run.model.config.name
  return Priced(workdir.name, name, metric, results[metric], interval)


def price_table(runs: list[Priced]) -> str:
  """Returns the runs as a Markdown table, the narrowest certificate first."""
  # Runs without a certificate have width NaN and come last.
  rows = [
    (
      run.name,
      run.model,
      f"{run.score:.4f}",
      *(
        ("-", "-")
        if run.interval is None
        else map("{:.3g}".format, run.interval)
      ),
      "-" if run.interval is None else f"{run.width:.2f}",
    )
    for run in sorted(runs, key=lambda run: (math.isnan(run.width), run.width))
  ]
  metric = runs[0].metric
  titles = ("run", "model", metric, "least", "greatest", "log10 of their ratio")
  return markdown_table(titles, rows, right=(2, 3, 4, 5))


def figure(runs: list[Priced]) -> Figure:
  """Returns the figure of scores over the width of the certificates."""
  # Split the runs into points with a certificate, and scores without.
  rows = sorted(
    (run.model, run.width, run.score)
    for run in runs
    if run.interval is not None
  )
  free = {run.model: run.score for run in runs if run.interval is None}

  def paint(fig: Any, rows: Any) -> None:
    # Draw a line of points for each model with a certificate.
    axes = fig.subplots()
    for number, (model, points) in enumerate(figures.grouped(rows).items()):
      widths, scores = zip(*((w, s) for _, w, s in points), strict=True)
      axes.plot(widths, scores, label=model, **figures.style(number))
    # Draw a horizontal line for each model without a certificate.
    for number, (model, score) in enumerate(free.items(), len(rows)):
      look = figures.style(number) | {"marker": None, "linestyle": ":"}
      axes.axhline(score, label=f"{model}, no certificate", **look)
    axes.set_xlabel("log10 of greatest over least factor of a distance")
    axes.set_ylabel(f"test {runs[0].metric}")
    figures.draw_legend(fig, axes)

  caption = (
    f"Test score of {len(runs)} runs over the width of the interval by which "
    "their encoders may change the distance of two sequences. Certificates are "
    "stronger to the left."
  )
  texts = Texts("price", "The price of a certificate", caption)
  columns = ("model", "log10 of the ratio", runs[0].metric)
  return Figure(*texts, columns, rows, paint)
