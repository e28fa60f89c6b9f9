"""The gate of the paper's authors, and the certified one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.transject import gate as gates
from tests.models.transject.examples import normal, prefix


def test_gate_is_a_convex_combination_of_masked_maxima():
  x, f = normal(0, 2, 5, 4), [normal(i, 2, 5, 4) for i in (1, 2, 3)]
  a, w, mask = jnp.float32(0.3), normal(4, 4), prefix([5, 3], 5)
  weights = gates.gate(x, f, a, w, mask)
  np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
  for b, length in enumerate([5, 3]):
    tops = [(x + a * one)[b, :length].max(0) for one in f]
    want = jax.nn.softmax(jnp.stack(tops) @ w)
    np.testing.assert_allclose(weights[b], want, atol=1e-6)


def test_certified_gate_is_its_formula():
  x, w, mask = normal(0, 2, 5, 4), 3 * normal(1, 3, 4), prefix([5, 3], 5)
  weights = gates.certified_gate(x, w, mask)
  for b, length in enumerate([5, 3]):
    tokens = np.asarray(x[b, :length], np.float64)
    h = tokens.mean(0) / np.sqrt(np.square(tokens).sum() / length)
    logits = np.asarray(w, np.float64) @ h
    want = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(weights[b], want, atol=1e-6)
  constant = 1 + np.sqrt(3) * np.linalg.norm(w - w.mean(0)) / 2
  np.testing.assert_allclose(gates.certified_constant(w), constant, rtol=1e-6)
  # What the softmax does not see costs nothing.
  np.testing.assert_allclose(gates.certified_constant(w[:1]), 1, atol=1e-5)
  chex.assert_trees_all_close(
    weights, gates.certified_gate(x, w - w.mean(0), mask), atol=1e-6
  )
  empty = gates.certified_gate(0 * x, w, mask & False)
  np.testing.assert_allclose(empty, 1 / 3)
  chex.assert_tree_all_finite(
    jax.grad(lambda w: gates.certified_constant(w))(jnp.zeros((3, 4)))
  )
