"""Statistics of every layer, sample by sample, streamed over data.

Unlike `lipschitz` and `smoothness`, which average over samples, this module
keeps one value per sample: activation factors and entropies of TransJect's
figures 4 and 5, the weights of its experts (figure 6), the distances of chosen
pairs of tokens (figure 1). No hidden states are kept.
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
from jaxformers.models.capture import Capture, batches, capture, parts
from jaxformers.models.variables import make_variables


class Layers(NamedTuple):
  """Statistics of s samples in L layers; the first of L + 1 is the embedding.

  Attributes:
    factors: mean activation factor over pairs of tokens, [L + 1, s]; NaN where
      a sample has no two different tokens.
    entropy: mean entropy over tokens (or units), [L + 1, s], in nats; NaN for a
      sample in which every token has equal values, or with fewer than 8 values.
    shape: mean entropy at deviation 1, [L + 1, s].
    finite: share of finite entropies, those of tokens (or units) without too
      many equal values, [L + 1], a mean over the samples with at least 8
      values; NaN if there is none.
    parts: mean entropy of every head's or expert's tokens, [L, p, s]; None for
      models without heads or experts.
    gates: weights of the experts, [L, s, e]; None for other models.
    values: number of values that an entropy is estimated from, [s].
    dots: median over pairs of tokens of their dot product over that of the
      embedding, [L + 1, s]; NaN as for `factors`. The ratio has no mean, for
      dot products near 0 are divided by.
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
  """Returns the statistics of all samples, measured a batch at a time.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    ids: samples, as the model takes them.
    batch_size: samples at a time; the last batch may be smaller.
    pairs: number of pairs of tokens per sample, for the activation factors.
    axis, estimator: options of the entropy, see `entropy.of_tokens`.
  """
  variables = make_variables(model, params)
  estimation = {"axis": axis, "estimator": estimator}
  measured = []
  for k, batch in enumerate(batches(ids, batch_size, "layers")):
    mask = np.asarray(model.mask(batch))
    # Every batch draws pairs by a seed of its own.
    places = lipschitz.pairs(mask, pairs, seed=k * batch_size)
    # Fetch a batch at a time: entropies are estimated on the host.
    observed = _observe(model, variables, batch, places)
    arrays: Any = (*jax.device_get(observed), estimation)
    measured.append(_measure_batch(*arrays))
  fields = zip(*measured, strict=True)
  factors, entropies, shapes, finite, each_part, gates, values, dots = fields
  # Weigh batches by their number of samples; leave out those without values.
  sizes = [batch.shape[1] for batch in factors]
  shares: Any = np.ma.average(np.ma.masked_invalid(finite), 0, sizes)
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
  """Returns the captured layers, their parts, and two factors of pairs.

  The factors are distances, and dot products over the embedding's.

  Compiled once for a model, whatever its parameters.
  """
  captured = capture(model, variables, ids)
  pair_distances = lipschitz.distances(captured.hidden, places)
  pair_dots = lipschitz.dot_factors(captured.hidden, places)
  layer_parts = parts(model, variables, captured)
  # Queries, keys and values are large, and not needed any more.
  return captured._replace(heads=()), layer_parts, pair_distances, pair_dots


def _measure_batch(
  captured: Capture,
  layer_parts: tuple[np.ndarray, ...] | None,
  pair_distances: np.ndarray,
  pair_dots: np.ndarray,
  estimation: Mapping[str, Any],
) -> Layers:
  """Returns the statistics of one batch, on the host.

  Args:
    captured: layers of the batch.
    layer_parts: result of `capture.parts`.
    pair_distances: result of `lipschitz.distances`.
    pair_dots: result of `lipschitz.dot_factors`.
    estimation: `axis` and `estimator` of the entropy.
  """
  mask, gates = np.asarray(captured.mask), captured.gates

  def estimate(x: Any) -> np.ndarray:
    return _entropy_by_sample(x, mask, **estimation)

  # Entropies of every layer, then of every head or expert: parts are
  # [b, p, n, e].
  entropies, shapes, finite = np.stack(list(map(estimate, captured.hidden)), 1)
  entropies_of_parts = None
  if layer_parts is not None:
    entropies_of_parts = np.array(
      [
        [estimate(part)[0] for part in layer.swapaxes(0, 1)]
        for layer in layer_parts
      ]
    )
  # Number of values per entropy: units of a token, or tokens of a unit.
  counts, width = mask.sum(1), captured.hidden[0].shape[-1]
  return Layers(
    # Factors are [L + 1, b, pairs], NaN where embeddings are equal.
    _finite_mean(lipschitz.activation_factors(pair_distances)),
    entropies,
    shapes,
    _finite_mean(finite),
    entropies_of_parts,
    None if gates is None else np.asarray(gates, np.float64),
    counts if estimation["axis"] == "tokens" else np.full_like(counts, width),
    _finite_median(pair_dots),
  )


def _finite_mean(values: np.ndarray) -> np.ndarray:
  """Returns means over the last axis; NaN where no value is finite."""
  return np.ma.masked_invalid(values).mean(-1).filled(math.nan)


def _finite_median(values: np.ndarray) -> np.ndarray:
  """Returns medians over the last axis; NaN where no value is finite."""
  return np.ma.median(np.ma.masked_invalid(values), -1).filled(math.nan)


def _entropy_by_sample(
  x: np.ndarray, mask: np.ndarray, axis: str, estimator: str
) -> np.ndarray:
  """Returns mean entropy, mean shape and finite share of samples, [3, b]."""
  rows = np.full((3, len(x)), math.nan)
  for k, row in enumerate(mask):
    # Leave NaN where there are too few values for an estimate.
    count = row.sum() if axis == "tokens" else x.shape[-1]
    if row.any() and count >= entropy.LEAST:
      estimates = entropy.of_tokens(
        x[k : k + 1], row[None], axis=axis, estimator=estimator
      )
      rows[:, k] = entropy.summary(estimates)[:3]
  return rows


def tokens(captured: Capture) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first sample: float64 [L + 1, n, d] and its mask [n]."""
  hidden = [np.asarray(x[0], np.float64) for x in captured.hidden]
  return np.array(hidden), np.asarray(captured.mask[0])


def distances(
  hidden: np.ndarray, mask: np.ndarray, places: list[tuple[int, int]]
) -> dict[str, np.ndarray]:
  """Returns distances of chosen pairs of tokens of a sample, layer by layer.

  Source: TransJect, figure 1.

  Args:
    hidden, mask: result of `tokens`.
    places: pairs of positions in the encoder's sequence.

  Returns:
    `euclidean` and `cosine` (1 less the cosine), float64 [L + 1, pairs].

  Raises:
    UserError: for a position where there is no token.
  """
  for place in itertools.chain(*places):
    if place not in np.flatnonzero(mask):
      raise UserError(
        f"There is no token at position {place}: the sample has "
        f"{int(mask.sum())}. Positions count from 0."
      )
  # Both tokens of each pair, [L + 1, pairs, d].
  first, second = (hidden[:, [pair[k] for pair in places]] for k in (0, 1))
  norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
  # The cosine with a token of zeros counts as 0, so its distance is 1.
  inner = (first * second).sum(-1)
  return {
    "euclidean": np.linalg.norm(first - second, axis=-1),
    "cosine": 1 - inner / np.where(norms > 0, norms, 1),
  }


def plane(
  hidden: np.ndarray, mask: np.ndarray, *, neighbours: int = 5
) -> np.ndarray:
  """Returns the tokens of every layer in a plane, float64 [L + 1, k, 2].

  Each layer has an Isomap of its own. It is turned and mirrored to lie as near
  to the layer before as possible, and not scaled: distances stay those of the
  layer's Isomap.

  Source: Isomap, Tenenbaum et al. 2000; TransJect, figure 7.

  Args:
    hidden, mask: result of `tokens`.
    neighbours: number of neighbours of a token in the graph; cut to the number
      of tokens less one.

  Raises:
    UserError: for fewer than four tokens.
  """
  requirements.require("plots", "An Isomap")
  from sklearn.manifold import Isomap

  x = hidden[:, mask]
  count = x.shape[1]
  if count < 4:
    raise UserError(
      f"{count} tokens are too few for an Isomap: give a sample of at least 4"
    )
  planes: list[np.ndarray] = []
  for layer in x:
    isomap = Isomap(n_neighbors=min(neighbours, count - 1), n_components=2)
    with warnings.catch_warnings():
      # Groups of tokens that are far apart are joined where they are nearest.
      warnings.simplefilter("ignore")
      y = isomap.fit_transform(layer)
    y = y - y.mean(0)
    if planes:
      # Turn to the layer before (orthogonal Procrustes).
      u, _, v = np.linalg.svd(y.T @ planes[-1])
      y = y @ (u @ v)
    planes.append(y)
  return np.array(planes)
