import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.foundations import platforms
from jaxformers.orthogonal import products


@pytest.mark.parametrize("d", [1, 2, 31, 32, 33, 70])
def test_inverse_of_a_matrix_of_positive_symmetric_part(d):
  rng = np.random.default_rng(d)
  with jax.enable_x64(True):
    s = rng.normal(size=(2, 3, d, d))
    m = np.eye(d) + s - s.swapaxes(-1, -2) + 0.1 * s @ s.swapaxes(-1, -2)
    found = products.inverse(jnp.asarray(m))
    np.testing.assert_allclose(found, np.linalg.inv(m), atol=1e-11)


def test_the_kernel_is_not_chosen_with_64_bits(monkeypatch):
  chosen = []

  def invert(m, *, with_kernel):
    chosen.append(with_kernel)
    return m

  monkeypatch.setattr(products, "_invert", invert)
  monkeypatch.setattr(platforms, "on_tpu", lambda: True)
  for is_wide in (False, True):
    with jax.enable_x64(is_wide):
      products.inverse(jnp.eye(2, dtype=jnp.float32))
  assert chosen == [True, False]


@pytest.mark.parametrize("d", [1, 9, 94, 128, 150])
def test_the_kernel_inverts_as_the_plain_form(d, monkeypatch):
  rng = np.random.default_rng(d)
  s = rng.normal(size=(2, d, d)) / np.sqrt(d)
  m = jnp.asarray(np.eye(d) + s - s.swapaxes(-1, -2), jnp.float32)
  plain = products.inverse(m)
  interpreted = functools.partial(products._eliminate_in_kernel, interpret=True)
  monkeypatch.setattr(products, "_eliminate_in_kernel", interpreted)
  found = products._invert(m, with_kernel=True)
  np.testing.assert_allclose(found, plain, atol=2e-6)
  np.testing.assert_allclose(found, np.linalg.inv(m), atol=2e-6)


def test_inverse_gradient_is_that_of_jax():
  with jax.enable_x64(True):
    s = np.random.default_rng(0).normal(size=(2, 9, 9))
    m = jnp.asarray(np.eye(9) + s - s.swapaxes(-1, -2))
    w = jnp.asarray(np.random.default_rng(1).normal(size=m.shape))
    ours = jax.grad(lambda m: (products.inverse(m) * w).sum())(m)
    jaxs = jax.grad(lambda m: (jnp.linalg.inv(m) * w).sum())(m)
    np.testing.assert_allclose(ours, jaxs, atol=1e-12)


def test_reorthogonalize_squares_the_defect_and_keeps_gradients():
  with jax.enable_x64(True):
    q = jnp.asarray(
      np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    )
    off = q + 1e-4 * jnp.asarray(np.random.default_rng(1).normal(size=(6, 6)))
    again = products.reorthogonalize(off)
    np.testing.assert_allclose(again.T @ again, np.eye(6), atol=1e-6)
    assert np.abs(off.T @ off - np.eye(6)).max() > 1e-5
    np.testing.assert_allclose(again, off, atol=1e-3)
    grad = jax.grad(lambda q: (products.reorthogonalize(q) * off).sum())(q)
    np.testing.assert_allclose(grad, off)
