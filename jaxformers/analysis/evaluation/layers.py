"""Statistics of every layer, sample by sample, streamed over data.

The modules `lipschitz` and `smoothness` average over samples. This module keeps
one value per sample: activation factors and entropies (TransJect, figures 4 and
5), weights of experts (figure 6), and distances of chosen pairs of tokens
(figure 1). Hidden states are not kept.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformers.analysis.certificates import lipschitz
from jaxformers.analysis.tokens import entropy
from jaxformers.foundations import requirements
from jaxformers.foundations.errors import UserError
from jaxformers.models import Model
from jaxformers.models.capture import (
  Capture,
  batches,
  capture,
  mask_of_states,
  parts,
)
from jaxformers.models.variables import make_variables


class Layers(NamedTuple):
  """Statistics of s samples in L layers.

  An axis of length L + 1 begins with the embedding.

  Attributes:
    factors: mean activation factor over pairs of tokens, [L + 1, s]; NaN for a
      sample without two different tokens.
    entropy: mean entropy over tokens (or units) in nats, [L + 1, s]; NaN for a
      sample in which every token has equal values, or with fewer than 8 values.
    shape: mean entropy at deviation 1, [L + 1, s].
    finite: share of finite entropies, [L + 1]; an entropy is infinite if a
      token (or unit) has too many equal values. A mean over the samples with at
      least 8 values; NaN if there is no such sample.
    parts: mean entropy of the tokens of every head or expert, [L, p, s]; None
      for models without heads or experts.
    gates: weights of the experts, [L, s, e]; None for other models.
    values: number of values that an entropy is estimated from, [s].
    dots: activation factor of the dot product, see `lipschitz.dot_factors`, as
      the median over pairs of tokens, [L + 1, s]; NaN as for `factors`. The
      mean does not exist, because dot products near 0 are divided by.
  """

  factors: np.ndarray
  entropy: np.ndarray
  shape: np.ndarray
  finite: np.ndarray
  parts: np.ndarray | None
  gates: np.ndarray | None
  values: np.ndarray
  dots: np.ndarray


def measure_layers(
  model: Model,
  params: Any,
  ids: np.ndarray,
  *,
  batch_size: int = 8,
  pairs: int = 200,
  axis: str = "units",
  estimator: str = "vasicek",
) -> Layers:
  """Returns the statistics of all samples, measured batch by batch.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    ids: samples, as the model takes them.
    batch_size: number of samples of a batch; the last batch may be smaller.
    pairs: number of pairs of tokens per sample, for the activation factors.
    axis, estimator: options of the entropy, see `entropy.of_tokens`.
  """
  variables = make_variables(model, params)
  estimation = {"axis": axis, "estimator": estimator}
  measured = []
  for k, batch in enumerate(batches(ids, batch_size, "layers")):
    mask = mask_of_states(model, batch)
    # Draw pairs with a different seed in every batch.
    places = lipschitz.pairs(mask, pairs, seed=k * batch_size)
    # Fetch one batch at a time; the host estimates the entropies.
    observed = _observe(model, variables, batch, places)
    arrays: Any = (*jax.device_get(observed), estimation)
    measured.append(_measure_batch(*arrays))
  fields = zip(*measured, strict=True)
  factors, entropies, shapes, finite, each_part, gates, values, dots = fields
  shares: Any = np.ma.masked_invalid(np.concatenate(finite, 1)).mean(1)
  return Layers(
    np.concatenate(factors, 1),
    np.concatenate(entropies, 1),
    np.concatenate(shapes, 1),
    shares.filled(math.nan),
    None if each_part[0] is None else np.concatenate(each_part, 2),
    None if gates[0] is None else np.concatenate(gates, 1),
    np.concatenate(values),
    np.concatenate(dots, 1),
  )


@functools.partial(jax.jit, static_argnums=0)
def _observe(
  model: Model, variables: Any, ids: jax.Array, places: jax.Array
) -> tuple[Capture, tuple[jax.Array, ...] | None, jax.Array, jax.Array]:
  """Returns the captured layers, their parts, and two measures of pairs.

  The measures are the results of `lipschitz.distances` and
  `lipschitz.dot_factors`. The function is compiled once for a model, for any
  parameters.
  """
  captured = capture(model, variables, ids)
  pair_distances = lipschitz.distances(captured.hidden, places)
  pair_dots = lipschitz.dot_factors(captured.hidden, places)
  layer_parts = parts(model, variables, captured)
  # Drop queries, keys and values, which are large.
  return captured._replace(heads=()), layer_parts, pair_distances, pair_dots


def _measure_batch(
  captured: Capture,
  layer_parts: tuple[np.ndarray, ...] | None,
  pair_distances: np.ndarray,
  pair_dots: np.ndarray,
  estimation: Mapping[str, Any],
) -> Layers:
  """Returns the statistics of one batch, computed on the host.

  Args:
    captured: hidden states of the batch.
    layer_parts: result of `capture.parts`.
    pair_distances: result of `lipschitz.distances`.
    pair_dots: result of `lipschitz.dot_factors`.
    estimation: `axis` and `estimator` of the entropy.
  """
  mask, gates = np.asarray(captured.mask), captured.gates

  def estimate(x: Any) -> np.ndarray:
    return _entropy_by_sample(x, mask, **estimation)

  # Estimate the entropies of every layer, [L + 1, b].
  entropies, shapes, finite = np.stack(list(map(estimate, captured.hidden)), 1)
  # Estimate the entropies of every head or expert; parts are [b, p, n, e].
  entropies_of_parts = None
  if layer_parts is not None:
    entropies_of_parts = np.array(
      [
        [estimate(part)[0] for part in layer.swapaxes(0, 1)]
        for layer in layer_parts
      ]
    )
  # Count the values of an entropy: units of a token, or tokens of a unit.
  counts, width = mask.sum(1), captured.hidden[0].shape[-1]
  return Layers(
    # Average factors [L + 1, b, pairs] without pairs of equal embeddings.
    _finite_mean(lipschitz.activation_factors(pair_distances)),
    entropies,
    shapes,
    finite,
    entropies_of_parts,
    None if gates is None else np.asarray(gates, np.float64),
    counts if estimation["axis"] == "tokens" else np.full_like(counts, width),
    _finite_median(pair_dots),
  )


def _finite_mean(values: np.ndarray) -> np.ndarray:
  """Returns means of finite values over the last axis; NaN without values."""
  return np.ma.masked_invalid(values).mean(-1).filled(math.nan)


def _finite_median(values: np.ndarray) -> np.ndarray:
  """Returns medians of finite values over the last axis; NaN without values."""
  return np.ma.median(np.ma.masked_invalid(values), -1).filled(math.nan)


def _entropy_by_sample(
  x: np.ndarray, mask: np.ndarray, axis: str, estimator: str
) -> np.ndarray:
  """Returns mean entropy, mean shape and share of finite ones, [3, b]."""
  rows = np.full((3, len(x)), math.nan)
  for k, row in enumerate(mask):
    # Keep NaN for samples with too few values for an estimate.
    count = row.sum() if axis == "tokens" else x.shape[-1]
    if row.any() and count >= entropy.LEAST:
      estimates = entropy.of_tokens(
        x[k : k + 1], row[None], axis=axis, estimator=estimator
      )
      rows[:, k] = entropy.summary(estimates)[:3]
  return rows


def tokens(captured: Capture) -> tuple[np.ndarray, np.ndarray]:
  """Returns hidden states and mask of sample 0, float64 [L + 1, n, d], [n]."""
  hidden = [np.asarray(x[0], np.float64) for x in captured.hidden]
  return np.array(hidden), np.asarray(captured.mask[0])


def distances(
  hidden: np.ndarray, mask: np.ndarray, places: list[tuple[int, int]]
) -> dict[str, np.ndarray]:
  """Returns the distances of chosen pairs of tokens, layer by layer.

  Source: TransJect, figure 1.

  Args:
    hidden, mask: result of `tokens`.
    places: pairs of positions in the encoder's sequence.

  Returns:
    `euclidean` and `cosine` (1 - cosine similarity), float64 [L + 1, pairs].

  Raises:
    UserError: for a position where there is no token.
  """
  for place in itertools.chain(*places):
    if place not in np.flatnonzero(mask):
      raise UserError(
        f"There is no token at position {place}: the sample has "
        f"{int(mask.sum())} tokens, and positions count from 0."
      )
  # Select both tokens of each pair, [L + 1, pairs, d].
  first, second = (hidden[:, [pair[k] for pair in places]] for k in (0, 1))
  norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
  # Define the cosine with a zero vector as 0, so that its distance is 1.
  inner = (first * second).sum(-1)
  return {
    "euclidean": np.linalg.norm(first - second, axis=-1),
    "cosine": 1 - inner / np.where(norms > 0, norms, 1),
  }


def plane(
  hidden: np.ndarray, mask: np.ndarray, *, neighbours: int = 5
) -> np.ndarray:
  """Returns the tokens of every layer in a plane, float64 [L + 1, k, 2].

  Each layer has its own Isomap. It is rotated and mirrored to lie as near as
  possible to the previous layer. It is not scaled, so that the distances of the
  Isomap are kept.

  Source: Isomap, Tenenbaum et al. 2000; TransJect, figure 7.

  Args:
    hidden, mask: result of `tokens`.
    neighbours: number of neighbours of a token in the graph, at most the number
      of tokens minus one.

  Raises:
    UserError: for fewer than four tokens.
  """
  requirements.require("plots", "An Isomap")
  from sklearn.manifold import Isomap

  x = hidden[:, mask]
  count = x.shape[1]
  if count < 4:
    raise UserError(
      f"{count} tokens are too few for an Isomap: give a sample of at least 4 "
      "tokens"
    )
  planes: list[np.ndarray] = []
  for layer in x:
    isomap = Isomap(n_neighbors=min(neighbours, count - 1), n_components=2)
    with warnings.catch_warnings():
      # Isomap warns when it connects separate parts of the neighbour graph.
      warnings.simplefilter("ignore")
      y = isomap.fit_transform(layer)
    y = y - y.mean(0)
    if planes:
      # Rotate to the previous layer (orthogonal Procrustes).
      u, _, v = np.linalg.svd(y.T @ planes[-1])
      y = y @ (u @ v)
    planes.append(y)
  return np.array(planes)
