"""Starts and steps of state-space models, against independent NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers import state_space
from jaxformers.scan import Pair

# Imaginary parts for N = 8, by mpmath with 40 digits.
LEGS_8 = [
  0.427488712285860119,
  1.95779415090280516,
  5.35420851503087423,
  19.8574103709705768,
]


def hippo_normal(size):
  """HiPPO-LegS plus its rank-one part, entry by entry."""
  matrix = np.zeros((size, size))
  for n in range(size):
    for k in range(size):
      root = np.sqrt((2 * n + 1) * (2 * k + 1))
      matrix[n, k] = -root if n > k else -(n + 1) * (n == k)
      matrix[n, k] += np.sqrt((n + 0.5) * (k + 0.5))
  return matrix


@pytest.mark.parametrize("size", [8, 64])
def test_legs_diagonalises_the_hippo_matrix(size):
  eigenvalues, vectors, b = state_space.legs(size)
  normal = hippo_normal(size)
  found = np.linalg.eigvals(normal)  # Another algorithm, of a real matrix.
  scale = np.abs(found).max()
  np.testing.assert_allclose(
    eigenvalues.imag, np.sort(found.imag), rtol=0, atol=1e-12 * scale
  )
  np.testing.assert_array_equal(eigenvalues.real, -0.5)
  np.testing.assert_allclose(
    vectors * eigenvalues @ vectors.conj().T, normal, rtol=0, atol=1e-12 * scale
  )
  np.testing.assert_allclose(
    vectors.conj().T @ vectors, np.eye(size), rtol=0, atol=1e-12
  )
  np.testing.assert_allclose(
    vectors @ b, np.sqrt(2 * np.arange(size) + 1), rtol=0, atol=1e-12 * size
  )


def test_legs_of_eight_states_by_hand():
  imag = state_space.legs(8)[0].imag[4:]
  np.testing.assert_allclose(imag, LEGS_8, rtol=1e-12)


def test_s4d_lin_and_s4d_inv_by_hand():
  np.testing.assert_allclose(
    state_space.s4d_lin(8), -0.5 + 1j * np.pi * np.array([0, 1, 2, 3]), 1e-12
  )
  want = [8 / np.pi * (8 / odd - 1) for odd in (1, 3, 5, 7)]
  np.testing.assert_allclose(
    state_space.s4d_inv(8), -0.5 + 1j * np.array(want), 1e-12
  )


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_discretize_is_the_formula_and_its_limit(method):
  eigenvalue = np.array([-0.5 + 3j, -2.0 - 40j, -1e-9 + 1e-9j, 0.0])
  step = np.array([1e-3, 0.1, 0.02, 0.05])
  with jax.enable_x64(True):
    log, factor = state_space.discretize(
      Pair(jnp.asarray(eigenvalue.real), jnp.asarray(eigenvalue.imag)),
      jnp.asarray(step),
      method,
    )
    a = state_space.exponential(log)
  a, factor = (np.asarray(p[0]) + 1j * np.asarray(p[1]) for p in (a, factor))
  z = step * eigenvalue
  if method == "zoh":
    # The series, where the formula divides by almost nothing.
    quotient = step * (1 + z / 2 + z**2 / 6)
    quotient[:2] = (np.exp(z[:2]) - 1) / eigenvalue[:2]
    want = np.exp(z), quotient
  else:
    want = (1 + z / 2) / (1 - z / 2), step / (1 - z / 2)
  np.testing.assert_allclose(a, want[0], rtol=1e-12)
  np.testing.assert_allclose(factor, want[1], rtol=1e-12)


def test_log_uniform_and_discretize_refuse_wrong_options():
  with pytest.raises(ValueError, match="step_min=0.1.*step_max=0.01"):
    state_space.log_uniform(0.1, 0.01)
  pair = Pair(jnp.ones(1), jnp.ones(1))
  with pytest.raises(
    ValueError, match="discretization.*'euler'.*bilinear, zoh"
  ):
    state_space.discretize(pair, jnp.ones(1), "euler")
