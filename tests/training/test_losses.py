import jax.numpy as jnp
import numpy as np

from jaxformers.training import losses


def batch(targets, weights):
  return {
    "targets": jnp.array(targets),
    "weights": jnp.array(weights, jnp.float32),
  }


def test_sums_by_hand():
  logits = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]))
  total, sums = losses.classification(
    logits, batch([1, 0, 1], [1, 1, 0]), jnp.array([0.5, 0.25, 9.0])
  )
  want = -np.log(0.75) - np.log(0.5)
  np.testing.assert_allclose(sums["loss"], want, rtol=1e-6)
  np.testing.assert_allclose(total, want + 0.75, rtol=1e-6)
  assert sums["objective"] == total
  assert (sums["correct"], sums["count"]) == (2, 2)


def test_padding_counts_nothing_even_if_it_is_not_finite():
  logits = jnp.array([[0.0, 1.0], [jnp.nan, jnp.nan]])
  total, sums = losses.classification(
    logits, batch([1, 0], [1, 0]), jnp.array([0.0, jnp.inf])
  )
  assert np.isfinite(total)
  assert np.isfinite(sums["loss"])
  assert sums["count"] == 1


def test_sown_losses_are_summed_by_example():
  sown = {"a": {"x": (jnp.array([1.0, 2.0]),)}, "b": (jnp.array([0.5, 0.5]),)}
  np.testing.assert_allclose(losses.sown_losses(sown, 2), [1.5, 2.5])
  np.testing.assert_allclose(losses.sown_losses({}, 2), [0, 0])


def test_what_pairs_have_sown_is_their_mean():
  total = losses.sown_losses({"a": jnp.array([1.0, 3.0, 5.0, 9.0])}, 2)
  assert total.tolist() == [2.0, 7.0]
