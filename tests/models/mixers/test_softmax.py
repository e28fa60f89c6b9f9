import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers import softmax as module
from tests.models.mixers.oracle import N, agree, dense, heads, tokens

softmax = functools.partial(module.softmax, param=None)  # Without a sink.


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_is_its_formula(causal):
  q, k, v = heads()
  seen = tokens()[:, None]
  if causal:
    seen = seen & np.tril(np.ones((N, N), bool))
  agree(softmax, (q, k, v), dense(q, k, v, seen), causal=causal)


def test_softmax_of_a_sample_without_tokens_is_finite():
  q = jnp.ones((1, 1, 3, 2))
  mask = jnp.zeros((1, 3), bool)
  assert np.isfinite(softmax(q, q, q, mask=mask, dropout=Dropout())).all()
