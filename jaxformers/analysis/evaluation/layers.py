"""What every layer does to tokens, sample by sample, streamed over data.

Distributions where `lipschitz` and `smoothness` have means: activation factors
and entropies of TransJect's figures 4 and 5, the weights of its experts (figure
6), the distances of chosen pairs of tokens (figure 1). Numbers a sample are
kept, and no activations.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers.analysis.certificates import lipschitz
from jaxformers.analysis.tokens import entropy
from jaxformers.analysis.tokens.capture import (
  Capture,
  capture,
  parts,
)
from jaxformers.errors import UserError
from jaxformers.models import Model
from jaxformers.models.variables import make_variables


class Layers(NamedTuple):
  """Of s samples and L layers; the first of L + 1 is the embedding.

  Attributes:
    factors: mean activation factor over pairs of tokens, [L + 1, s]; NaN where
      a sample has no two different tokens.
    entropy: mean over tokens (or units), [L + 1, s], in nats; NaN where all
      have equal values.
    shape: the same at deviation 1.
    finite: the share of tokens (or units) without equal values, [L + 1], mean
      over the samples that have values enough; NaN if none has.
    parts: mean entropy of every head's or expert's tokens, [L, p, s]; None for
      models without.
    gates: weights of the experts, [L, s, e]; None for other models.
    values: how many an entropy is estimated from, [s].
  """

  factors: np.ndarray
  entropy: np.ndarray
  shape: np.ndarray
  finite: np.ndarray
  parts: np.ndarray | None
  gates: np.ndarray | None
  values: np.ndarray


def measure_layers(
  model: Model,
  params: Any,
  ids: np.ndarray,
  *,
  batch_size: int = 8,
  pairs: int = 200,
  axis: str = "units",
  estimator: str = "vasicek",
  seed: int = 0,
) -> Layers:
  """All of it, a batch at a time.

  Args:
    model, params: any of `models.build`, in evaluation.
    ids: samples, as the model takes them.
    batch_size: samples at a time; the last batch may be smaller.
    pairs: of tokens a sample, for the activation factors.
    axis, estimator: of the entropy, see `entropy.of_tokens`.
    seed: of the pairs.
  """
  own = make_variables(model, params)
  batches: list[Layers] = []
  for k in tqdm(range(0, len(ids), batch_size), "layers", disable=None):
    batch = jnp.asarray(ids[k : k + batch_size])
    mask = np.asarray(model.mask(batch))
    chosen = lipschitz.pairs(mask, pairs, seed + k)
    seen = jax.device_get(_of(model, own, batch, jnp.asarray(chosen)))
    batches.append(_batch(*seen, axis, estimator))
  sizes = [one.factors.shape[1] for one in batches]

  def joined(name: str, place: int) -> Any:
    values = [getattr(one, name) for one in batches]
    return None if values[0] is None else np.concatenate(values, place)

  shares = np.ma.masked_invalid([one.finite for one in batches])
  finite = np.ma.average(shares, 0, sizes).filled(math.nan)
  return Layers(
    joined("factors", 1),
    joined("entropy", 1),
    joined("shape", 1),
    finite,
    joined("parts", 2),
    joined("gates", 1),
    joined("values", 0),
  )


@functools.partial(jax.jit, static_argnums=0)
def _of(
  model: Model, own: Any, ids: jax.Array, chosen: jax.Array
) -> tuple[Capture, tuple[jax.Array, ...] | None, jax.Array]:
  """Compiled once for a model, whatever its parameters."""
  found = capture(model, own, ids)
  apart = lipschitz.distances(found.hidden, chosen)
  return found._replace(heads=()), parts(model, own, found), apart


def _batch(
  found: Capture,
  each: tuple[np.ndarray, ...] | None,
  apart: np.ndarray,
  axis: str,
  estimator: str,
) -> Layers:
  factors = lipschitz.activation_factors(apart)
  hidden = [_by_sample(x, found.mask, axis, estimator) for x in found.hidden]
  entropies, shapes, shares = (
    np.array(rows) for rows in zip(*hidden, strict=True)
  )
  entropies_of_parts = None
  if each is not None:
    entropies_of_parts = np.array(
      [
        [
          _by_sample(layer[:, p], found.mask, axis, estimator)[0]
          for p in range(layer.shape[1])
        ]
        for layer in each
      ]
    )
  counts, width = found.mask.sum(1), found.hidden[0].shape[-1]
  with np.errstate(invalid="ignore"):
    mean = np.array([[_mean(row) for row in layer] for layer in factors])
  return Layers(
    mean,
    entropies,
    shapes,
    np.array([_mean(row) for row in shares]),
    entropies_of_parts,
    None if found.gates is None else np.asarray(found.gates, np.float64),
    counts if axis == "tokens" else np.full_like(counts, width),
  )


def _mean(values: np.ndarray) -> float:
  known = values[np.isfinite(values)]
  return float(known.mean()) if len(known) else math.nan


def _by_sample(
  x: np.ndarray, mask: np.ndarray, axis: str, estimator: str
) -> tuple[list[float], list[float], list[float]]:
  """Mean entropy, mean shape and finite share of every sample."""
  rows = []
  for one, own in zip(x, mask, strict=True):
    # Too few tokens or units have no entropy.
    least = own.sum() if axis == "tokens" else x.shape[-1]
    if not own.any() or least < entropy.LEAST:
      rows.append((math.nan, math.nan, math.nan))
      continue
    found = entropy.of_tokens(
      one[None], own[None], axis=axis, estimator=estimator
    )
    means = entropy.summary(found)
    rows.append((means.entropy, means.shape, means.finite))
  first, second, third = zip(*rows, strict=True)
  return list(first), list(second), list(third)


def tokens(found: Capture) -> tuple[np.ndarray, np.ndarray]:
  """The first sample between layers: float64 [L + 1, n, d] and its mask [n]."""
  hidden = np.array([np.asarray(x[0], np.float64) for x in found.hidden])
  return hidden, np.asarray(found.mask[0])


def distances(
  hidden: np.ndarray, mask: np.ndarray, places: list[tuple[int, int]]
) -> dict[str, np.ndarray]:
  """How far chosen pairs of tokens of one sample are, layer by layer.

  Source: TransJect, figure 1.

  Args:
    hidden, mask: of `tokens`.
    places: pairs of positions in the encoder's sequence.

  Returns:
    `euclidean` and `cosine` (1 less the cosine), float64 [L + 1, pairs].

  Raises:
    UserError: for a position where there is no token.
  """
  for pair in places:
    for place in pair:
      if not 0 <= place < len(mask) or not mask[place]:
        raise UserError(
          f"There is no token at position {place}: the sample has "
          f"{int(mask.sum())}, counted from 0."
        )
  one, other = (hidden[:, [pair[k] for pair in places]] for k in (0, 1))
  norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
  inner = (one * other).sum(-1)
  return {
    "euclidean": np.linalg.norm(one - other, axis=-1),
    "cosine": 1 - inner / np.where(norms > 0, norms, 1),
  }


def plane(
  hidden: np.ndarray, mask: np.ndarray, *, neighbours: int = 5
) -> np.ndarray:
  """Tokens of every layer in a plane, by Isomap -> float64 [L + 1, k, 2].

  Each layer for itself (Tenenbaum et al. 2000; TransJect, figure 7), turned,
  mirrored and moved to lie as near the layer before as that lets it, and not
  scaled: distances stay the layer's own.

  Args:
    hidden, mask: of `tokens`.
    neighbours: of each token in the graph, at most one less than there are.

  Raises:
    UserError: for fewer than four tokens.
  """
  from sklearn.manifold import Isomap

  x = hidden[:, mask]
  count = x.shape[1]
  if count < 4:
    raise UserError(f"{count} tokens: an Isomap of a sample takes four.")
  found = []
  for layer in x:
    isomap = Isomap(n_neighbors=min(neighbours, count - 1), n_components=2)
    y = isomap.fit_transform(layer)
    y = y - y.mean(0)
    if found:
      u, _, v = np.linalg.svd(y.T @ found[-1])
      y = y @ (u @ v)
    found.append(y)
  return np.array(found)
