"""The differential entropy of activations, by estimators with names.

TransJect's equation 10 takes an activation for a density: it has no value where
activations are negative, as a third to a half of them are, and its two sides
differ. It can mean the differential entropy of one token's values over its
units, or of one unit's over tokens, estimated from the sample. The entropy is
in nats, and grows by log c if activations are multiplied by c. Models of
different scales are therefore compared by `shape`, the entropy less log sigma.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry, choose

ESTIMATORS: Registry = Registry("estimator of entropy")
AXES = ("units", "tokens")
LEAST = 8  # Least number of values that an entropy is estimated from.

# Entropy of N(0, sigma^2), less log sigma.
GAUSSIAN = 0.5 * math.log(2 * math.pi * math.e)


def _spacings(values: np.ndarray, method: str) -> np.ndarray:
  with np.errstate(divide="ignore"):  # Ties have log 0.
    return scipy.stats.differential_entropy(values, axis=-1, method=method)


# Spacings of order statistics (Vasicek 1976), and with the correction at the
# ends of the sample (Ebrahimi et al. 1994); the window is sqrt(n) + 1/2.
for _method in ("vasicek", "ebrahimi"):
  ESTIMATORS.register(_method)(functools.partial(_spacings, method=_method))


@ESTIMATORS.register("nearest")
def nearest(values: np.ndarray, k: int = 3) -> np.ndarray:
  """Estimates the entropy by the distance eps_k to the k-th neighbour.

  psi(n) - psi(k) + log 2 + E log eps_k, in one dimension.

  Source: Kozachenko and Leonenko 1987.

  Args:
    values: float64 [..., n], n > k.
    k: number of the neighbour, from 1.
  """
  n = values.shape[-1]
  # In one dimension the k nearest are among k on either side in order: pad with
  # infinities, and look at windows around each value.
  ordered = np.sort(values, -1)
  sides = [(0, 0)] * (values.ndim - 1) + [(k, k)]
  padded = np.pad(ordered, sides, constant_values=np.inf)
  windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * k + 1, -1)
  # The least distance of a window, 0, is that of the value to itself.
  gaps = np.abs(windows - ordered[..., None])
  with np.errstate(divide="ignore"):
    logs = np.log(np.partition(gaps, k, -1)[..., k])
  # The estimate of Kozachenko and Leonenko in one dimension.
  constant = scipy.special.digamma(n) - scipy.special.digamma(k) + math.log(2)
  return constant + logs.mean(-1)


@ESTIMATORS.register("kde")
def kde(values: np.ndarray) -> np.ndarray:
  """Estimates -E log p, p a Gaussian kernel density of the other points.

  The bandwidth is Scott's, sigma n^(-1/5). Takes n^2 kernels, a row at a time.

  Args:
    values: float64 [..., n].
  """
  n = values.shape[-1]
  flat = values.reshape(-1, n)
  entropies = np.empty(len(flat))
  for row, x in enumerate(flat):
    width = x.std(ddof=1) * n ** (-1 / 5)
    if not width:  # All values are equal.
      entropies[row] = -np.inf
      continue
    # Log densities of all pairs of points.
    exponent = -0.5 * np.square((x[:, None] - x) / width)
    np.fill_diagonal(exponent, -np.inf)  # Leave the point itself out.
    log_p = scipy.special.logsumexp(exponent, 1)
    constant = math.log((n - 1) * width * math.sqrt(2 * math.pi))
    entropies[row] = constant - log_p.mean()
  return entropies.reshape(values.shape[:-1])


@ESTIMATORS.register("gaussian")
def gaussian(values: np.ndarray) -> np.ndarray:
  """Returns log(2 pi e sigma^2) / 2, the entropy of a normal distribution.

  A control: no distribution of that variance has more.

  Args:
    values: float64 [..., n].
  """
  with np.errstate(divide="ignore"):
    return GAUSSIAN + np.log(values.std(-1, ddof=1))


class Entropy(NamedTuple):
  """Entropies of many samples, [...] each.

  Attributes:
    entropy: entropy in nats; -inf where values are equal.
    log_scale: log of the standard deviation.
  """

  entropy: np.ndarray
  log_scale: np.ndarray

  @property
  def shape(self) -> np.ndarray:
    """Entropy at deviation 1, which no scale changes."""
    with np.errstate(invalid="ignore"):
      return self.entropy - self.log_scale


def entropy(values: np.ndarray, estimator: str = "vasicek") -> Entropy:
  """Estimates the entropy of samples along the last axis.

  Args:
    values: real [..., n]; no noise is added to equal values.
    estimator: name in `ESTIMATORS`.

  Raises:
    UserError: for fewer than eight values, or an unknown estimator.
  """
  values = np.asarray(values, np.float64)
  if values.shape[-1] < LEAST:
    raise UserError(
      f"{values.shape[-1]} values are too few for an entropy: give at least "
      f"{LEAST}."
    )
  estimate = ESTIMATORS[estimator]
  with np.errstate(divide="ignore"):
    log_scale = np.log(values.std(-1, ddof=1))
  return Entropy(estimate(values), log_scale)


@functools.cache
def normal(count: int, estimator: str = "vasicek") -> float:
  """Returns the mean estimate of samples of N(0, 1), at deviation 1.

  No distribution has more than `GAUSSIAN`, and few values give less. Samples of
  another distribution may be estimated with another bias, and a little higher.
  The mean is over random samples, exact to about 0.002.

  Args:
    count: number of values of one sample.
    estimator: name in `ESTIMATORS`.
  """
  # As many values in all, whatever the size of a sample.
  rows = max(16, 2**17 // count)
  values = np.random.default_rng(0).normal(size=(rows, count))
  return float(entropy(values, estimator).shape.mean())


class Summary(NamedTuple):
  """Means over the entropies of one layer.

  Attributes:
    entropy: mean of the finite entropies, in nats.
    shape: mean of the finite entropies at deviation 1.
    finite: share of finite entropies, those of samples without equal values.
    num_entropies: number of entropies.
  """

  entropy: float
  shape: float
  finite: float
  num_entropies: int


def of_tokens(
  x: np.ndarray,
  mask: np.ndarray,
  *,
  axis: str = "units",
  estimator: str = "vasicek",
) -> Entropy:
  """Estimates the entropy of a layer's activations, without padding.

  Args:
    x: activations, [b, n, d].
    mask: [b, n], True at tokens.
    axis: "units" for the d values of every token; "tokens" for every unit over
      the tokens of each sample that has at least eight.
    estimator: name in `ESTIMATORS`.

  Returns:
    Arrays [k]: k tokens; or d for each sample, one after the other.

  Raises:
    UserError: for an unknown name, or if no sample has eight tokens.
  """
  choose("axis", axis, AXES)
  x, mask = np.asarray(x, np.float64), np.asarray(mask, bool)
  if axis == "units":
    return entropy(x[mask], estimator)
  # Transpose to [d, tokens]: a unit's values are those over tokens.
  parts = [
    entropy(tokens[sample_mask].T, estimator)
    for tokens, sample_mask in zip(x, mask, strict=True)
    if sample_mask.sum() >= LEAST
  ]
  if not parts:
    raise UserError(
      'axis="tokens" needs a sample of at least eight tokens: give longer '
      'ones, or choose "units".'
    )
  return Entropy(*map(np.concatenate, zip(*parts, strict=True)))


def summary(estimates: Entropy) -> Summary:
  """Returns means over the finite entropies; NaN if there is none."""
  finite = np.isfinite(estimates.entropy) & np.isfinite(estimates.log_scale)
  mean, shape = (
    float(values[finite].mean()) if finite.any() else math.nan
    for values in (estimates.entropy, estimates.shape)
  )
  return Summary(mean, shape, float(finite.mean()), finite.size)
