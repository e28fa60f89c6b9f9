"""The differential entropy of activations, by estimators with names.

TransJect's equation 10 takes an activation for a density: it has no value where
activations are negative, as a third to a half of them are, and its two sides
differ. What can be meant is the differential entropy of one token's values over
its units, or of one unit's over tokens, estimated from the sample; it is in
nats, and adds log c if activations are multiplied by c, so that models of
different scales are compared by `shape`, the entropy less log sigma.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats

from jaxformers.errors import UserError
from jaxformers.registry import Registry, choose

ESTIMATORS: Registry = Registry("estimator of entropy")
AXES = ("units", "tokens")
LEAST = 8  # Values that an entropy is estimated from.

# Of N(0, sigma^2), less log sigma.
GAUSSIAN = 0.5 * math.log(2 * math.pi * math.e)


def _spacings(method: str) -> Callable[[np.ndarray], np.ndarray]:
  def estimate(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # Ties have log 0.
      return scipy.stats.differential_entropy(values, axis=-1, method=method)

  return estimate


# Spacings of order statistics (Vasicek 1976), and with the correction at the
# ends of the sample (Ebrahimi et al. 1994); the window is sqrt(n) + 1/2.
ESTIMATORS.register("vasicek")(_spacings("vasicek"))
ESTIMATORS.register("ebrahimi")(_spacings("ebrahimi"))


@ESTIMATORS.register("nearest")
def nearest(values: np.ndarray, k: int = 3) -> np.ndarray:
  """By the distance to the k-th nearest (Kozachenko and Leonenko 1987).

  psi(n) - psi(k) + log 2 + E log eps_k, in one dimension.

  Args:
    values: float64 [..., n], n > k.
    k: which neighbour.
  """
  n = values.shape[-1]
  ordered = np.sort(values, -1)
  padded = np.concatenate(
    [
      np.full((*values.shape[:-1], k), -np.inf),
      ordered,
      np.full((*values.shape[:-1], k), np.inf),
    ],
    -1,
  )
  # In one dimension the k nearest are among k on either side.
  gaps = np.stack(
    [
      np.abs(padded[..., j : j + n] - ordered)
      for j in (*range(k), *range(k + 1, 2 * k + 1))
    ],
    -1,
  )
  with np.errstate(divide="ignore"):
    logs = np.log(np.partition(gaps, k - 1, -1)[..., k - 1])
  constant = scipy.special.digamma(n) - scipy.special.digamma(k) + math.log(2)
  return constant + logs.mean(-1)


@ESTIMATORS.register("kde")
def kde(values: np.ndarray) -> np.ndarray:
  """-E log p, p a Gaussian kernel density without the point itself.

  Of Scott's bandwidth, sigma n^(-1/5). Takes n^2 kernels, a row at a time.

  Args:
    values: float64 [..., n].
  """
  n = values.shape[-1]
  flat = values.reshape(-1, n)
  found = np.empty(len(flat))
  for row, x in enumerate(flat):
    width = x.std(ddof=1) * n ** (-1 / 5)
    if not width:
      found[row] = -np.inf
      continue
    exponent = -0.5 * np.square((x[:, None] - x) / width)
    np.fill_diagonal(exponent, -np.inf)
    log_p = scipy.special.logsumexp(exponent, 1)
    constant = math.log((n - 1) * width * math.sqrt(2 * math.pi))
    found[row] = constant - log_p.mean()
  return found.reshape(values.shape[:-1])


@ESTIMATORS.register("gaussian")
def gaussian(values: np.ndarray) -> np.ndarray:
  """log(2 pi e sigma^2) / 2: the entropy if it were normal, and no less.

  A control: no distribution of that variance has more.

  Args:
    values: float64 [..., n].
  """
  with np.errstate(divide="ignore"):
    return GAUSSIAN + np.log(values.std(-1, ddof=1))


class Entropy(NamedTuple):
  """Of many samples, [...] each.

  Attributes:
    entropy: in nats; -inf where values are equal.
    log_scale: log of the standard deviation.
  """

  entropy: np.ndarray
  log_scale: np.ndarray

  @property
  def shape(self) -> np.ndarray:
    """The entropy at deviation 1, which no scale changes."""
    with np.errstate(invalid="ignore"):
      return self.entropy - self.log_scale


def entropy(values: np.ndarray, estimator: str = "vasicek") -> Entropy:
  """Of samples along the last axis.

  Args:
    values: real [..., n]; equal values are what they are: no noise is added.
    estimator: in `ESTIMATORS`.

  Raises:
    UserError: for fewer than eight values, or an estimator that there is not.
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
  """What an estimator gives of so many values of N(0, 1), in the mean.

  At deviation 1, where no distribution has more than the true `GAUSSIAN`; few
  values give less. Those of another distribution may be estimated with another
  bias, and a little higher. The mean of samples that are drawn, to about 0.002.

  Args:
    count: of the values of one sample.
    estimator: in `ESTIMATORS`.
  """
  rows = max(16, 2**17 // count)
  values = np.random.default_rng(0).normal(size=(rows, count))
  return float(entropy(values, estimator).shape.mean())


class Summary(NamedTuple):
  """Of one layer.

  Attributes:
    entropy: the mean of the finite ones, in nats.
    shape: the mean at deviation 1.
    finite: the share that is finite: without equal values.
    count: how many there were.
  """

  entropy: float
  shape: float
  finite: float
  count: int


def of_tokens(
  x: np.ndarray,
  mask: np.ndarray,
  *,
  axis: str = "units",
  estimator: str = "vasicek",
) -> Entropy:
  """The entropy of activations, without padding.

  Args:
    x: [b, n, d], of one layer.
    mask: [b, n], True at tokens.
    axis: "units", of the d values of every token; "tokens", of every unit over
      the tokens of each sample that has at least eight.
    estimator: in `ESTIMATORS`.

  Returns:
    Arrays [k]: k tokens; or d for each sample, one after the other.
  """
  choose("axis", axis, AXES)
  x, mask = np.asarray(x, np.float64), np.asarray(mask, bool)
  if axis == "units":
    return entropy(x[mask], estimator)
  parts = [
    entropy(row[own].T, estimator)
    for row, own in zip(x, mask, strict=True)
    if own.sum() >= LEAST
  ]
  if not parts:
    raise UserError(
      'axis="tokens" needs a sample of at least eight tokens: give longer '
      'ones, or choose "units".'
    )
  return Entropy(*(np.concatenate(found) for found in zip(*parts, strict=True)))


def summary(found: Entropy) -> Summary:
  """Means over what is finite; NaN if nothing is."""
  finite = np.isfinite(found.entropy) & np.isfinite(found.log_scale)
  count = int(finite.size)
  if not finite.any():
    return Summary(math.nan, math.nan, 0.0, count)
  return Summary(
    float(found.entropy[finite].mean()),
    float(found.shape[finite].mean()),
    float(finite.mean()),
    count,
  )
