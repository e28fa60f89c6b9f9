"""Estimators of entropy, on samples whose entropy is known."""

import math

import numpy as np
import pytest
import scipy.spatial
import scipy.stats

from jaxformers.analysis.tokens import entropy as e

# Mean and deviation of an estimate of N(0, 1), whose entropy is 1.4189: n,
# estimator, mean, and a tolerance of the mean of the samples drawn here.
NORMAL = [
  (64, "vasicek", 1.280, 0.03),
  (64, "ebrahimi", 1.368, 0.03),
  (64, "nearest", 1.41, 0.03),
  (512, "vasicek", 1.401, 0.01),
  (512, "ebrahimi", 1.430, 0.01),
  (512, "nearest", 1.419, 0.015),
  (512, "kde", 1.427, 0.012),
  (512, "gaussian", 1.418, 0.01),
  (4096, "vasicek", 1.420, 0.008),
  (4096, "ebrahimi", 1.429, 0.008),
  (4096, "nearest", 1.420, 0.01),
]


@pytest.mark.parametrize(("n", "estimator", "want", "tolerance"), NORMAL)
def test_entropy_of_normal_samples_is_near_the_exact_value(
  n, estimator, want, tolerance
):
  rows = {64: 200, 512: 100, 4096: 20}[n] // (10 if estimator == "kde" else 1)
  x = np.random.default_rng(1).normal(size=(rows, n))
  estimate = e.entropy(x, estimator)
  spread = 3 * estimate.entropy.std() / math.sqrt(rows)
  assert abs(estimate.entropy.mean() - want) < max(tolerance, spread)


@pytest.mark.parametrize(
  ("n", "estimator", "want"),
  [(64, "vasicek", 1.280), (512, "vasicek", 1.401), (64, "ebrahimi", 1.368)],
)
def test_normal_is_the_biased_entropy_of_few_normal_samples(n, estimator, want):
  # At the sample's own deviation, whose logarithm is below 0 in the mean.
  want += 1 / (2 * (n - 1))
  assert e.normal(n, estimator) == pytest.approx(want, abs=0.006)


@pytest.mark.parametrize("estimator", sorted(e.ESTIMATORS))
def test_entropy_adds_log_of_scale_and_ignores_location(estimator):
  x = np.random.default_rng(0).gamma(2.0, size=(3, 100))
  plain, scaled = e.entropy(x, estimator), e.entropy(7 * x - 50, estimator)
  np.testing.assert_allclose(
    scaled.entropy - plain.entropy, math.log(7), atol=1e-9
  )
  np.testing.assert_allclose(plain.shape, scaled.shape, atol=1e-9)
  np.testing.assert_allclose(plain.log_scale, np.log(x.std(-1, ddof=1)))


@pytest.mark.parametrize("estimator", ["ebrahimi", "kde", "nearest", "vasicek"])
def test_entropy_of_uniform_and_laplace_samples(estimator):
  rng = np.random.default_rng(0)
  # Uniform on [0, 3]: log 3. Laplace of scale 1: 1 + log 2.
  uniform = e.entropy(rng.uniform(0, 3, (4, 800)), estimator).entropy.mean()
  laplace = e.entropy(rng.laplace(size=(4, 800)), estimator).entropy.mean()
  # A kernel density is rounder than a uniform one.
  assert uniform == pytest.approx(math.log(3), abs=0.12)
  assert laplace == pytest.approx(1 + math.log(2), abs=0.1)
  # The control knows the variance alone, 2.
  control = e.entropy(rng.laplace(size=(4, 800)), "gaussian").entropy.mean()
  assert control == pytest.approx(e.GAUSSIAN + math.log(2) / 2, abs=0.06)


def test_nearest_neighbour_entropy_matches_a_kd_tree():
  x = np.random.default_rng(2).normal(size=(1, 50))
  for k in (1, 3, 5):
    eps = scipy.spatial.KDTree(x.T).query(x.T, k + 1)[0][:, k]
    psi = scipy.special.digamma
    want = psi(50) - psi(k) + math.log(2) + np.log(eps).mean()
    assert e.nearest(x, k)[0] == pytest.approx(want)


def test_kde_entropy_is_scipys_leave_one_out():
  x = np.random.default_rng(3).normal(size=30)
  logs = []
  for i in range(30):
    rest = np.delete(x, i)
    width = x.std(ddof=1) * 30 ** (-1 / 5) / rest.std(ddof=1)
    logs.append(scipy.stats.gaussian_kde(rest, width).logpdf(x[i])[0])
  assert e.kde(x[None])[0] == pytest.approx(-np.mean(logs))


@pytest.mark.parametrize("estimator", sorted(e.ESTIMATORS))
def test_entropy_of_equal_values_is_left_out_of_the_summary(estimator):
  rows = np.stack([np.ones(40), np.random.default_rng(0).normal(size=40)])
  estimates = e.entropy(rows, estimator)
  assert estimates.entropy[0] == -np.inf
  means = e.summary(estimates)
  assert means.finite == 0.5
  assert means.num_entropies == 2
  assert means.entropy == pytest.approx(estimates.entropy[1])
  assert math.isnan(e.summary(e.entropy(rows[:1], estimator)).shape)


@pytest.mark.parametrize("axis", e.AXES)
def test_of_tokens_reads_no_padding(axis):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 20, 16))
  mask = np.arange(20) < np.array([[20], [9], [3]])
  estimates = e.of_tokens(x, mask, axis=axis)
  other = e.of_tokens(np.where(mask[..., None], x, 1e9), mask, axis=axis)
  np.testing.assert_array_equal(estimates.entropy, other.entropy)
  # 32 tokens; or 16 units of the two samples with eight tokens.
  assert estimates.entropy.shape == (32,)
  want = e.entropy(x[1, :9].T if axis == "tokens" else x[1, :9])
  start = 16 if axis == "tokens" else 20
  np.testing.assert_allclose(
    estimates.entropy[start : start + len(want.entropy)], want.entropy
  )


def test_entropy_refuses_too_few_values():
  with pytest.raises(ValueError, match="7 values.*8"):
    e.entropy(np.arange(7.0))
  with pytest.raises(ValueError, match="'shannon'.*vasicek"):
    e.entropy(np.arange(9.0), "shannon")
  x = np.zeros((1, 4, 9))
  with pytest.raises(ValueError, match="'heads'.*units"):
    e.of_tokens(x, np.ones((1, 4)), axis="heads")
  with pytest.raises(ValueError, match='axis="tokens".*(eight|8)'):
    e.of_tokens(x, np.ones((1, 4)), axis="tokens")
