import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.softmax import earlier, softmax, weigh
from tests.models.mixers.oracle import N, agree, dense, heads, tokens


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_formula(causal):
  q, k, v = heads()
  seen = tokens()[:, None]
  if causal:
    seen = seen & np.tril(np.ones((N, N), bool))
  agree(softmax, (q, k, v), dense(q, k, v, seen), causal=causal)


def test_a_sample_without_tokens_stays_finite():
  q = jnp.ones((1, 1, 3, 2))
  mask = jnp.zeros((1, 3), bool)
  assert np.isfinite(
    softmax(q, q, q, mask=mask, dropout=lambda w, part=None: w)
  ).all()


def test_where_nothing_is_seen_weights_are_uniform():
  scores = jnp.array([[1.0, 5.0], [2.0, 3.0]])
  weights = weigh(scores, jnp.array([[False], [True]]))
  np.testing.assert_allclose(weights[0], [0.5, 0.5])
  np.testing.assert_allclose(weights.sum(1), 1)


def test_earlier_keys():
  want = [[True, False, False], [True, True, False]]
  assert earlier(2, 3).tolist() == want
