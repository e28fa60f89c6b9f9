"""Rotary positions."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import rotary


def test_rotate_is_a_complex_product():
  x = np.random.default_rng(0).normal(size=(2, 3, 5, 8)).astype(np.float32)
  places = np.array([[0, 1, 2, 9, 4]])
  rates = 10_000.0 ** (-np.arange(4) / 4)
  pairs = x[..., :4] + 1j * x[..., 4:]
  turned = pairs * np.exp(1j * places[:, None, :, None] * rates)
  want = np.concatenate([turned.real, turned.imag], -1)
  found = rotary.rotate(jnp.asarray(x), jnp.asarray(places))
  np.testing.assert_allclose(found, want, atol=2e-6)


@pytest.mark.slow
def test_rotate_keeps_scores_of_equal_distances():
  q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 6, 4))
  places = jnp.arange(6)[None]

  def scores(first):
    turned = (rotary.rotate(jnp.asarray(a), places + first) for a in (q, k))
    return jnp.einsum("bhne,bhme->bhnm", *turned)

  chex.assert_trees_all_close(scores(0), scores(5), atol=1e-5)
