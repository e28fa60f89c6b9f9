"""Sigma, from the embedded tokens or learned."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import orthogonal
from jaxformers.models.transject import sigma as sigmas
from tests.models.transject.examples import normal, prefix


def test_sigma_is_the_least_squares_diagonal_over_its_maximum():
  x, mask = normal(0, 2, 9, 4), prefix([9, 6], 9)
  basis = orthogonal.cayley(normal(1, 4, 4))
  sigma, error = sigmas.eigenvalues(x, basis, mask)
  for b, length in enumerate([9, 6]):
    tokens = np.asarray(x[b, :length], np.float64)
    gram = tokens.T @ tokens / length
    best = np.diag(np.asarray(basis, np.float64).T @ gram @ basis)
    np.testing.assert_allclose(sigma[b], best / best.max(), atol=1e-6)
    rest = gram - basis @ np.diag(best) @ basis.T
    np.testing.assert_allclose(error[b], np.sum(rest**2), rtol=1e-4)


def test_eigenvalues_in_the_eigenvector_basis_have_no_error():
  x = normal(0, 1, 9, 4)
  _, vectors = np.linalg.eigh(np.asarray(x[0]).T @ np.asarray(x[0]))
  _, error = sigmas.eigenvalues(x, jnp.asarray(vectors), jnp.ones((1, 9), bool))
  assert float(error[0]) < 1e-5


def test_eigenvalues_error_is_near_that_of_the_published_code():
  """Theirs is the mean over the entries of x.T x itself."""
  n, d = 9, 4
  x, basis = normal(0, 1, n, d), orthogonal.cayley(normal(1, d, d))
  gram = np.asarray(x[0]).T @ np.asarray(x[0])
  turned = np.asarray(basis).T @ gram @ np.asarray(basis)
  theirs = np.square(turned - np.diag(np.diag(turned))).mean()
  _, error = sigmas.eigenvalues(x, basis, jnp.ones((1, n), bool))
  np.testing.assert_allclose(error[0], theirs * d**2 / n**2, rtol=1e-4)


def test_eigenvalues_error_has_a_gradient_for_the_basis_only():
  x, mask = normal(0, 1, 9, 4), jnp.ones((1, 9), bool)
  basis = orthogonal.cayley(normal(1, 4, 4))
  by_x, by_basis = jax.grad(
    lambda x, q: sigmas.eigenvalues(x, q, mask)[1].sum(), argnums=(0, 1)
  )(x, basis)
  assert not np.any(by_x)
  assert np.any(by_basis)


@pytest.mark.parametrize("n", [4, 9])
@pytest.mark.slow
def test_eigenvalues_forward_is_the_same_with_gradients(n):
  """Made from x.T x if there are more tokens than channels, else from x U."""
  mask = prefix([n, n - 1], n)
  x, basis = normal(0, 2, n, 4), orthogonal.cayley(normal(1, 4, 4))
  weights = normal(2, 2, 4), normal(3, 2)

  def plain(x, basis):
    x = jnp.where(mask[..., None], x, 0)
    count = mask.sum(1)

    def diagonal(x):
      return jnp.square(x @ basis).sum(1) / count[:, None]

    values, fixed = diagonal(x), jax.lax.stop_gradient(x)
    gram = jnp.einsum("bni,bnj->bij", fixed, fixed) / count[:, None, None]
    rest = jnp.square(gram).sum((1, 2)) - jnp.square(diagonal(fixed)).sum(1)
    return values / values.max(1, keepdims=True), rest

  def loss(function, x, basis):
    sigma, error = function(x, basis)
    return (weights[0] * sigma).sum() + (weights[1] * error).sum()

  def ours(x, basis):
    return sigmas.eigenvalues(x, basis, mask)

  chex.assert_trees_all_close(ours(x, basis), plain(x, basis), rtol=1e-5)
  expected = jax.value_and_grad(loss, (1, 2))(plain, x, basis)
  found = jax.value_and_grad(loss, (1, 2))(ours, x, basis)
  chex.assert_trees_all_close(found[0], expected[0], rtol=1e-5)
  chex.assert_trees_all_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
  forwards = jax.jacfwd(lambda *args: loss(ours, *args), (0, 1))(x, basis)
  chex.assert_trees_all_close(forwards, expected[1], rtol=1e-4, atol=1e-5)


def test_eigenvalues_without_tokens_are_zero():
  sigma, error = sigmas.eigenvalues(
    normal(0, 1, 3, 4), jnp.eye(4), jnp.zeros((1, 3), bool)
  )
  chex.assert_trees_all_equal((sigma, error), (jnp.zeros((1, 4)), jnp.zeros(1)))


@pytest.mark.slow
def test_eigenvalues_of_an_empty_sample_have_finite_gradients():
  mask = prefix([3, 0], 3)

  def loss(basis, s):
    sigma, error = sigmas.eigenvalues(normal(0, 2, 3, 4), basis, mask)
    return jnp.square(sigma + sigmas.learned_sigma(s)).sum() + error.sum()

  grads = jax.grad(loss, (0, 1))(jnp.eye(4), jnp.zeros(4))
  chex.assert_tree_all_finite(grads)
