"""Dynamical isometry: singular values of an encoder's Jacobian.

Source: TransJect, section 2; Pennington et al. 2017,
https://arxiv.org/abs/1711.04735. The Jacobian of a single layer holds fixed the
values that earlier layers pass on (TransJect's Sigma, NeuTRENO's values).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.analysis.plotting import figures, plots
from jaxformers.analysis.plotting.figures import Row, Texts
from jaxformers.foundations.errors import UserError
from jaxformers.models import Model, from_config, in_float32
from jaxformers.models import capture as captures
from jaxformers.models.variables import make_variables

ALL = "all"  # Label of the whole encoder; labels of layers are numbers.
MOST_ROWS = 2_048  # Largest number of rows of a Jacobian that is stored whole.
CHUNK = 64  # Number of rows that are computed together.
# Values of Lanczos' method with a smaller weight are due to rounding.
LEAST_WEIGHT = 1e-12
LEVELS = np.linspace(0, 1, 21)  # Quantiles that a figure is drawn from.

Map = Callable[[jax.Array], jax.Array]


class Spectrum(NamedTuple):
  """Weighted distribution of the singular values of a Jacobian.

  Attributes:
    values: singular values in ascending order, float64 [k].
    weights: share of the distribution at each value, float64 [k], of sum 1.
  """

  values: np.ndarray
  weights: np.ndarray

  def quantiles(self, levels: np.ndarray) -> np.ndarray:
    """Returns the quantiles of the distribution at `levels`, [levels]."""
    shares, levels = np.cumsum(self.weights), np.asarray(levels)
    # Rounding may leave the last share below 1.
    places = np.searchsorted(shares, levels * shares[-1] - 1e-9)
    # The greatest value may have a smaller weight than this.
    return np.where(levels < 1, self.values[places], self.values[-1])

  def root_mean_square(self) -> float:
    """Returns the root mean square of the factor of a random perturbation."""
    return float(np.sqrt((self.weights * self.values**2).sum()))


def join(spectra: Sequence[Spectrum]) -> Spectrum:
  """Returns the mixture of several distributions with equal shares."""
  values, weights = map(np.concatenate, zip(*spectra, strict=True))
  order = np.argsort(values)
  return Spectrum(values[order], weights[order] / len(spectra))


def decompose(jacobian: np.ndarray) -> Spectrum:
  """Returns all singular values of a matrix [n, m] with equal weights."""
  values = np.linalg.svd(jacobian, compute_uv=False)[::-1].astype(float)
  return Spectrum(values, np.full(len(values), 1 / len(values)))


def bidiagonalize(
  pull: Map, push: Map, start: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the diagonals of the bidiagonal B in A V = U B.

  Uses the method of Golub, Kahan and Lanczos. Every vector is orthogonalised
  twice against all previous vectors.

  Source: Golub and Kahan 1965, https://doi.org/10.1137/0702016.

  Args:
    pull: function y [g, m] -> A.T y [g, m], for g matrices A.
    push: function x [g, m] -> A x [g, m].
    start: first columns of V, [g, m], of length 1.
    steps: number k of columns.

  Returns:
    Diagonal [k, g] and superdiagonal [k, g] of B. The last entry of the
    superdiagonal is outside of B.
  """

  def orthogonalize(x: jax.Array, basis: jax.Array) -> jax.Array:
    for _ in range(2):
      inner = jnp.einsum("kgm,gm->kg", basis, x)
      x = x - jnp.einsum("kg,kgm->gm", inner, basis)
    return x

  def normalize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    norm = jnp.linalg.norm(x, axis=-1)
    return x / jnp.where(norm > 0, norm, 1)[..., None], norm

  def step(state: Any, k: jax.Array) -> tuple[Any, Any]:
    left, right, v = state
    # u = A v / |A v|, orthogonal to the columns of U.
    # Columns that are not computed yet are zero, and do not contribute.
    right = right.at[k].set(v)
    u, diagonal = normalize(orthogonalize(push(v), left))
    left = left.at[k].set(u)
    # v = A.T u / |A.T u|, orthogonal to the columns of V.
    v, superdiagonal = normalize(orthogonalize(pull(u), right))
    return (left, right, v), (diagonal, superdiagonal)

  zeros = jnp.zeros((steps, *start.shape), start.dtype)
  with jax.default_matmul_precision("highest"):
    _, diagonals = jax.lax.scan(step, (zeros, zeros, start), jnp.arange(steps))
  return diagonals


def quadrature(diagonal: np.ndarray, superdiagonal: np.ndarray) -> Spectrum:
  """Returns an estimate of the spectrum of A: the singular values of B [k, k].

  The weights come from Gauss quadrature for the starting vector. The estimate
  is exact for the mean square along the start. It is exact for all singular
  values if there are as many steps as A has rows.

  Source: Golub and Meurant 2010, Matrices, Moments and Quadrature, chapter 6.

  Args:
    diagonal, superdiagonal: result of `bidiagonalize` for one A, [k] each.
  """
  b = np.diag(diagonal.astype(float)) + np.diag(superdiagonal[:-1], 1)
  _, values, right = np.linalg.svd(b)
  weights = right[:, 0] ** 2
  # Drop values without a share of the start: they are due to rounding or to
  # zero vectors.
  order = np.argsort(values)
  order = order[weights[order] > LEAST_WEIGHT]
  return Spectrum(values[order], weights[order] / weights[order].sum())


def measure_spectra(
  model: Model,
  params: Any,
  ids: np.ndarray,
  *,
  steps: int = 32,
  seed: int = 0,
  most_rows: int = MOST_ROWS,
) -> dict[str, list[Spectrum]]:
  """Returns the singular values of each layer and of the encoder, by sample.

  The model is evaluated in float32. The two sequences of a pair count as two
  samples. Samples without tokens are skipped.

  Args:
    model, params: model and parameters from `models.build`.
    ids: samples, as the model takes them.
    steps: number of steps of Lanczos' method, which is used for Jacobians of
      more than `most_rows` rows.
    seed: seed of the starting vectors.
    most_rows: largest number of rows of a Jacobian that is computed whole.

  Returns:
    A list with the `Spectrum` of every sample, for each layer ("1", "2", ...)
    and for all layers together (`ALL`).

  Raises:
    UserError: for a model with several streams.
  """
  streams = model.config.block.get("streams", 1)
  if streams > 1:
    raise UserError(
      f"block.streams={streams}: layers map {streams} streams of tokens, and "
      "their Jacobians are not implemented. Measure a model of one stream."
    )
  # Use float32, and memory="stored", with which every layer is called.
  config = dataclasses.replace(in_float32(model).config, memory="stored")
  model = from_config(config)
  variables = make_variables(model, params)
  names = [str(layer + 1) for layer in range(config.num_layers)]
  spectra: dict[str, list[Spectrum]] = {name: [] for name in [*names, ALL]}
  key = jax.random.key(seed)
  for number, sample in enumerate(captures.batches(ids, 1, "isometry")):
    sample = np.asarray(model.close_holes(jnp.asarray(sample))[0])
    masks = np.asarray(model.mask(sample))
    num_rows = masks.shape[1] * config.d_model
    start = jax.random.normal(
      jax.random.fold_in(key, number), (*masks.shape, config.d_model)
    )
    # Measure the single layers, and then all layers as one map.
    for labels, is_whole in ((names, False), ([ALL], True)):
      if num_rows <= most_rows:
        # Small Jacobians: decompose the whole matrices.
        matrices = _matrices(model, variables, sample, is_whole)
        results = map(decompose, _without_padding(matrices, masks))
      else:
        # Large Jacobians: take Lanczos steps, at most one per singular value.
        count = min(steps, max(1, int(masks.sum(1).min())) * config.d_model)
        arguments = (model, is_whole, count, variables, sample, start)
        diagonals = jax.device_get(_diagonals(*arguments))
        # Transpose [k, l b] to a row for each Jacobian.
        results = map(quadrature, *(x.T for x in diagonals))
      # Results are ordered by layer, and then by sequence of a pair.
      for place, result in enumerate(results):
        if masks[place % len(masks)].any():
          spectra[labels[place // len(masks)]].append(result)
  return spectra


def _without_padding(
  matrices: np.ndarray, masks: np.ndarray
) -> list[np.ndarray]:
  """Returns Jacobians [g, n d, n d] without the rows and columns of padding."""
  width = matrices.shape[-1] // masks.shape[1]
  kept = [np.repeat(mask, width) for mask in masks]
  return [
    matrix[np.ix_(rows, rows)]
    for matrix, rows in zip(
      matrices, kept * (len(matrices) // len(kept)), strict=True
    )
  ]


def _pull(
  model: Model, variables: Any, ids: jax.Array, is_whole: bool
) -> tuple[Map, jax.Array]:
  """Returns y -> J.T y of the Jacobians, and zeros of their shape of outputs.

  Inputs and outputs of the function are [l, b, n, d].

  Args:
    model, variables, ids: arguments of `capture`. The model calls every layer
      (memory="stored").
    is_whole: True for the Jacobian of all layers as one map, with l = 1.
  """

  def outputs(changes: jax.Array) -> jax.Array:
    # Add a change to the input of every layer, by intercepting its call.
    def change_input(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
      path = context.module.path
      is_layer = path[:1] == ("encoder",) and len(path) == 2
      if context.method_name != "__call__" or not is_layer:
        return call(*args, **kwargs)
      stack, _, number = path[1].partition("_")
      if stack != "layer" or (is_whole and number != "0"):
        return call(*args, **kwargs)
      # Stop the gradient at the layer's input, so that the Jacobian does not
      # include the previous layers.
      (x,) = args
      if not is_whole:
        x = jax.lax.stop_gradient(x)
        kwargs = kwargs | {"carry": jax.lax.stop_gradient(kwargs["carry"])}
      return call(x + changes[int(number)], **kwargs)

    with (
      nn.intercept_methods(change_input),
      jax.default_matmul_precision("highest"),
    ):
      _, state = model.apply(
        variables, ids, train=False, mutable=["intermediates"]
      )
    hidden = state["intermediates"]["encoder"]["hidden"]
    return jnp.stack(hidden[-1:] if is_whole else hidden[1:])

  count = 1 if is_whole else model.config.num_layers
  shape = (count, *model.mask(ids).shape, model.config.d_model)
  _, pull = jax.vjp(outputs, jnp.zeros(shape))
  return lambda y: pull(y)[0], jnp.zeros(shape)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _rows(
  model: Model,
  variables: Any,
  ids: jax.Array,
  places: jax.Array,
  is_whole: bool,
) -> jax.Array:
  """Returns the rows of the Jacobians at `places`, [places, l, b, n d]."""
  pull, zeros = _pull(model, variables, ids, is_whole)
  count, b, n, d = zeros.shape

  def row(place: jax.Array) -> jax.Array:
    unit = jax.nn.one_hot(place, n * d).reshape(n, d)
    return pull(jnp.broadcast_to(unit, zeros.shape)).reshape(count, b, n * d)

  return jax.vmap(row)(places)


def _matrices(
  model: Model, variables: Any, ids: np.ndarray, is_whole: bool
) -> np.ndarray:
  """Returns the whole Jacobians, [l b, n d, n d]."""
  num_rows = model.mask(ids).shape[1] * model.config.d_model
  # Compute the same number of rows in every call, which compiles once.
  places = np.arange(-(-num_rows // CHUNK) * CHUNK).reshape(-1, CHUNK)
  rows = [
    np.asarray(_rows(model, variables, ids, chunk, is_whole))
    for chunk in places
  ]
  matrices = np.concatenate(rows)[:num_rows]
  return np.moveaxis(matrices, 0, 2).reshape(-1, num_rows, num_rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _diagonals(
  model: Model,
  is_whole: bool,
  steps: int,
  variables: Any,
  ids: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the result of `bidiagonalize` for the Jacobians.

  Args:
    model, is_whole, variables, ids: arguments of `_pull`.
    steps: number of steps.
    start: starting vectors, [b, n, d].
  """
  pull, zeros = _pull(model, variables, ids, is_whole)
  # Transpose the transpose to get x -> J x: mixers may lack forward mode.
  _, push = jax.vjp(pull, zeros)
  mask = model.mask(ids)[..., None]
  # Set padding to zero in the inputs and outputs of the Jacobians.
  rows = (zeros.shape[0] * zeros.shape[1], -1)

  def on_tokens(linear: Map) -> Map:
    def apply(x: jax.Array) -> jax.Array:
      x = jnp.where(mask, x.reshape(zeros.shape), 0)
      return jnp.where(mask, linear(x), 0).reshape(rows)

    return apply

  # Scale the starts to length 1, [l b, n d].
  first = jnp.broadcast_to(jnp.where(mask, start, 0), zeros.shape).reshape(rows)
  norm = jnp.linalg.norm(first, axis=-1, keepdims=True)
  first = first / jnp.where(norm > 0, norm, 1)
  return bidiagonalize(
    on_tokens(pull), on_tokens(lambda x: push(x)[0]), first, steps
  )


def rows(
  label: str, seed: int, spectra: Mapping[str, Sequence[Spectrum]]
) -> list[Row]:
  """Returns the quantiles over all samples, as rows of `plots.over_layers`.

  Args:
    label: label of the run.
    seed: seed of the run.
    spectra: result of `measure_spectra`.

  Returns:
    (label, seed, layer, quantile, singular value).
  """
  return [
    (label, seed, layer, float(level), float(value))
    for layer, of_layer in spectra.items()
    if of_layer
    for level, value in zip(
      LEVELS, join(of_layer).quantiles(LEVELS), strict=True
    )
  ]


EXPLANATION = (
  "Singular values of the Jacobian of one sequence, of every layer and of all "
  "layers (TransJect, section 2). In a dynamical isometry all are near 1. "
  f"Jacobians of at most {MOST_ROWS:,} rows, tokens times d, are whole; of "
  "larger ones the distribution is an estimate by Lanczos' method, and the "
  "extremes lie inside the true ones. Boxes: quartiles; whiskers: the extremes."
)


def figure(
  value_rows: list[Row], data: str, name: str = "isometry"
) -> figures.Figure:
  """Returns the figure of singular values of each layer and of the encoder.

  Args:
    value_rows: results of `rows` for several runs and seeds.
    data: sentence on samples and seeds, with which the caption begins.
    name: name of the figure's files.
  """
  texts = Texts(name, "Dynamical isometry", f"{data}. {EXPLANATION}")
  return plots.over_layers(
    texts,
    value_rows,
    "singular value of the Jacobian",
    lines=[(1.0, "isometry")],
    ratio=True,
    x="layer",
    sample="quantile",
    whiskers=(0, 100),
  )


COLUMNS = ("least", "5 %", "median", "95 %", "greatest", "root mean square")


def text(label: str, spectra: Mapping[str, Sequence[Spectrum]]) -> str:
  """Returns the table of a run, a line for each layer and for the encoder.

  Args:
    label: heading of the table.
    spectra: result of `measure_spectra`.
  """
  lines = [label, f"  {'layer':>5}" + "".join(f"  {c:>9}" for c in COLUMNS)]
  for layer, of_layer in spectra.items():
    if of_layer:
      joined = join(of_layer)
      values = joined.quantiles(np.array([0, 0.05, 0.5, 0.95, 1])).tolist()
      values.append(joined.root_mean_square())
      cells = (f"  {value:>9.4g}" for value in values)
      lines.append(f"  {layer:>5}{''.join(cells)}")
  return "\n".join(lines)
