"""Differential entropy of activations, with a choice of estimators.

TransJect's equation 10 uses activations as densities. The equation is undefined
for negative activations (a third to a half of them), and its two sides differ.
This module reads it as the differential entropy of a sample: the values of one
token over its units, or the values of one unit over tokens.

The entropy is in nats. If activations are multiplied by c, the entropy grows by
log c. To compare models of different scales, use `shape`, the entropy minus
log sigma.
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
LEAST = 8  # Smallest number of values that an entropy is estimated from.

# Entropy of N(0, sigma^2) minus log sigma.
GAUSSIAN = 0.5 * math.log(2 * math.pi * math.e)


def _spacings(values: np.ndarray, method: str) -> np.ndarray:
  """Returns the entropy by an estimator of SciPy, from sorted spacings."""
  with np.errstate(divide="ignore"):  # The log of a tie is -inf.
    return scipy.stats.differential_entropy(values, axis=-1, method=method)


# Register two estimators from spacings of order statistics, with a window of
# sqrt(n) + 1/2: Vasicek 1976, and Ebrahimi et al. 1994, who correct the ends of
# the sample.
for _method in ("vasicek", "ebrahimi"):
  ESTIMATORS.register(_method)(functools.partial(_spacings, method=_method))


@ESTIMATORS.register("nearest")
def nearest(values: np.ndarray, k: int = 3) -> np.ndarray:
  """Returns the entropy estimated from distances to the k-th neighbour.

  In one dimension the estimate is psi(n) - psi(k) + log 2 + E log eps_k, where
  eps_k is the distance of a value to its k-th neighbour.

  Source: Kozachenko and Leonenko 1987.

  Args:
    values: float64 [..., n], n > k.
    k: number of the neighbour, from 1.
  """
  n = values.shape[-1]
  # Sort the values: the k nearest are among the k before and the k after a
  # value. Take windows of 2 k + 1 values, padded with infinities.
  ordered = np.sort(values, -1)
  sides = [(0, 0)] * (values.ndim - 1) + [(k, k)]
  padded = np.pad(ordered, sides, constant_values=np.inf)
  windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * k + 1, -1)
  # Entry k of a sorted window is the k-th neighbour: entry 0 is the value.
  gaps = np.abs(windows - ordered[..., None])
  with np.errstate(divide="ignore"):
    logs = np.log(np.partition(gaps, k, -1)[..., k])
  # psi(n) - psi(k) + log 2.
  constant = scipy.special.digamma(n) - scipy.special.digamma(k) + math.log(2)
  return constant + logs.mean(-1)


@ESTIMATORS.register("kde")
def kde(values: np.ndarray) -> np.ndarray:
  """Returns the entropy -E log p, with p a kernel density estimate.

  The density at a point is a mean of Gaussian kernels at the other points. The
  bandwidth is Scott's, sigma n^(-1/5). Evaluates n^2 kernels for each row.

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
    # Evaluate the log kernels of all pairs of points, [n, n].
    exponent = -0.5 * np.square((x[:, None] - x) / width)
    np.fill_diagonal(exponent, -np.inf)  # Leave the point itself out.
    log_p = scipy.special.logsumexp(exponent, 1)
    constant = math.log((n - 1) * width * math.sqrt(2 * math.pi))
    entropies[row] = constant - log_p.mean()
  return entropies.reshape(values.shape[:-1])


@ESTIMATORS.register("gaussian")
def gaussian(values: np.ndarray) -> np.ndarray:
  """Returns log(2 pi e sigma^2) / 2, the entropy of a normal distribution.

  This is the maximum over all distributions with the variance of the sample,
  and serves as a control.

  Args:
    values: float64 [..., n].
  """
  with np.errstate(divide="ignore"):
    return GAUSSIAN + np.log(values.std(-1, ddof=1))


class Entropy(NamedTuple):
  """Entropies of many samples, [...] each.

  Attributes:
    entropy: entropy in nats; -inf if too many values are equal.
    log_scale: logarithm of the standard deviation.
  """

  entropy: np.ndarray
  log_scale: np.ndarray

  @property
  def shape(self) -> np.ndarray:
    """Entropy at deviation 1, which is invariant to scale."""
    with np.errstate(invalid="ignore"):
      return self.entropy - self.log_scale


def entropy(values: np.ndarray, estimator: str = "vasicek") -> Entropy:
  """Returns the entropy of samples along the last axis.

  Args:
    values: real numbers, [..., n]. Equal values stay equal: no noise is added.
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
  """Returns the mean estimate for samples of N(0, 1), at deviation 1.

  `GAUSSIAN` is the maximum over all distributions; the estimate is biased low
  for small samples. The bias depends on the distribution, so that estimates for
  another distribution may be slightly above this value. The mean is over random
  samples, and has an error of about 0.002.

  Args:
    count: number of values of a sample.
    estimator: name in `ESTIMATORS`.
  """
  # Draw about the same number of values for every size of a sample.
  rows = max(16, 2**17 // count)
  values = np.random.default_rng(0).normal(size=(rows, count))
  return float(entropy(values, estimator).shape.mean())


class Summary(NamedTuple):
  """Means over the entropies of one layer.

  Attributes:
    entropy: mean of the finite entropies, in nats.
    shape: mean of the finite entropies at deviation 1.
    finite: share of finite entropies; an entropy is infinite if too many values
      of its sample are equal.
    num_entropies: number of entropies, finite or not.
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
  """Returns the entropies of a layer's activations, without padding.

  Args:
    x: activations, [b, n, d].
    mask: [b, n], True at tokens.
    axis: "units" for the entropy of every token over its d values; "tokens" for
      the entropy of every unit over the tokens of a sample. The latter skips
      samples of fewer than eight tokens.
    estimator: name in `ESTIMATORS`.

  Returns:
    Arrays [k], with an entry for every token, or for every sample and unit.

  Raises:
    UserError: for an unknown name, or if no sample has eight tokens.
  """
  choose("axis", axis, AXES)
  x, mask = np.asarray(x, np.float64), np.asarray(mask, bool)
  if axis == "units":
    return entropy(x[mask], estimator)
  # Transpose each sample to [d, tokens].
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
