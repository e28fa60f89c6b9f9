import jax.numpy as jnp
import numpy as np

from jaxformers.models.mixers.scores import earlier, weigh


def test_weigh_without_keys_is_uniform():
  scores = jnp.array([[1.0, 5.0], [2.0, 3.0]])
  weights = weigh(scores, jnp.array([[False], [True]]))
  np.testing.assert_allclose(weights[0], [0.5, 0.5])
  np.testing.assert_allclose(weights.sum(1), 1)


def test_earlier_is_the_causal_mask():
  want = [[True, False, False], [True, True, False]]
  assert earlier(2, 3).tolist() == want
