"""Test scores of runs, plotted over their certified Lipschitz constants."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers.analysis.certificates import attention, lipschitz
from jaxformers.analysis.plotting import figures
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table
from jaxformers.inference import load_run
from jaxformers.models import in_float32
from jaxformers.models.blocks.fixed_point import LENGTHS
from jaxformers.models.blocks.invertible import layers_of, shared_by_all
from jaxformers.models.variables import make_variables, of_stack


class Certificate(NamedTuple):
  """Factors by which an encoder may change the distance of two sequences.

  Attributes:
    distance: "sequences" for the Frobenius norm, "farthest" for the greatest
      distance of two tokens.
    least, greatest: smallest and largest factor; the least is 0 if nothing
      keeps two sequences apart.
  """

  distance: str
  least: float
  greatest: float


class Priced(NamedTuple):
  """Score and certificate of a run.

  Attributes:
    name: name of the run's folder.
    model: name of the model.
    metric: name of the score.
    score: test score; accuracies are shares.
    certificate: certified factors of the encoder; None without a certificate.
  """

  name: str
  model: str
  metric: str
  score: float
  certificate: Certificate | None

  @property
  def greatest(self) -> float:
    """Log10 of the greatest factor; NaN without a certificate."""
    if self.certificate is None:
      return math.nan
    return math.log10(self.certificate.greatest)


def find_certificate(model: Any, params: Any) -> Certificate | None:
  """Returns the certified factors of an encoder for two sequences, or None.

  The result is None if the encoder has no certificate, or if the bound of its
  layers depends on the data, as TransJect's does with eigenvalues or the
  paper's gate; and for attention after a LayerNorm, whose constant is vacuous,
  and for constants above 10^300.

  Args:
    model, params: model and its parameters.
  """
  model = in_float32(model)
  block = model.stacks()["encoder"]
  layers = layers_of(block)
  if layers is None:
    bounds = attention.certify(model, params, model.config.encoder_len)
    if bounds["missing"] or bounds["norm"]:
      return None
    log = bounds["log10"]["tokens"]
    return Certificate("farthest", 0.0, 10**log) if log < 300 else None
  if block.final_norm:
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
  kind = next(kind for kind in LENGTHS if kind in rows[0])
  return Certificate(kind, *lipschitz.product([row[kind] for row in rows]))


def price(workdir: Path) -> Priced:
  """Returns the certificate and the score of a run.

  Raises:
    UserError: if `inference.load_run` fails, or if the run has not ended.
  """
  run = load_run(workdir)
  workdirs.read_results(workdir)  # The run has ended.
  results = run.results
  if not results:
    raise UserError(
      f"{workdir} has results of an earlier checkpoint: run its training "
      "command again, to its end."
    )
  metric = results["metric"]
  certificate = find_certificate(run.model, run.params)
  name = run.model.config.name
  return Priced(workdir.name, name, metric, results[metric], certificate)


def price_table(runs: list[Priced]) -> str:
  """Returns the runs as a Markdown table, the least constant first."""

  # Runs without a certificate have NaN and come last.
  def order(run: Priced) -> tuple[bool, float]:
    return math.isnan(run.greatest), run.greatest

  rows = []
  for run in sorted(runs, key=order):
    cells = ("-", "-", "-")
    if run.certificate:
      distance, least, greatest = run.certificate
      cells = (f"{least:.3g}", f"{greatest:.3g}", distance)
    rows.append((run.name, run.model, f"{run.score:.4f}", *cells))
  titles = ("run", "model", runs[0].metric, "least", "greatest", "distance")
  return markdown_table(titles, rows, right=(2, 3, 4))


def figure(runs: list[Priced]) -> Figure:
  """Returns the figure of scores over the certified constants."""
  # Split the runs into points with a certificate, and scores without.
  rows = sorted(
    (f"{run.model}, {run.certificate.distance}", run.greatest, run.score)
    for run in runs
    if run.certificate
  )
  free = [(run.model, run.score) for run in runs if not run.certificate]

  def paint(fig: Any, rows: Any) -> None:
    # Draw a line of points for each model with a certificate.
    axes = fig.subplots()
    for number, (model, points) in enumerate(figures.grouped(rows).items()):
      factors, scores = zip(*((x, s) for _, x, s in points), strict=True)
      axes.plot(factors, scores, label=model, **figures.style(number))
    # Draw a horizontal line for each model without a certificate.
    for number, (model, score) in enumerate(free, len(rows)):
      look = figures.style(number) | {"marker": None, "linestyle": ":"}
      axes.axhline(score, label=f"{model}, no certificate", **look)
    axes.set_xlabel("log10 of the greatest factor of a distance")
    axes.set_ylabel(f"test {runs[0].metric}")
    figures.draw_legend(fig, axes)

  caption = (
    f"Test score of {len(runs)} runs over the greatest factor by which their "
    "encoders may change the distance of two sequences: the Frobenius norm "
    "(sequences), or the greatest distance of two tokens (farthest). "
    "Certificates are stronger to the left, and are not compared between "
    "the two distances."
  )
  texts = Texts("price", "The price of a certificate", caption)
  columns = ("model", "log10 of the greatest factor", runs[0].metric)
  return Figure(*texts, columns, rows, paint)
