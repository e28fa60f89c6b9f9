import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.informer import (
  _measure,
  _measure_by_blocks,
  informer,
)
from tests import draws
from tests.models.mixers.oracle import (
  B,
  H,
  N,
  agree,
  dense,
  given,
  heads,
  tokens,
  weigh,
)

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_queries": 5, "num_samples": 4}


def formula(q, k, v, mask, place, count):
  want = np.zeros_like(v)
  for b in range(B):
    at = np.flatnonzero(mask[b])
    for h in range(H):
      own = {
        i: q[b, h, i] @ k[b, h, at[np.floor(place[r] * len(at)).astype(int)]].T
        for r, i in enumerate(at)
      }
      measure = [own[i].max() - own[i].mean() for i in at]
      best = at[np.argsort(measure)[::-1][:count]]
      want[b, h] = v[b, h, at].mean(0)
      scores = q[b, h, best] @ k[b, h, at].T / 2
      want[b, h, best] = weigh(scores, True) @ v[b, h, at]
  return want


@pytest.mark.parametrize("count", [3, 8])
def test_informer_is_its_formula(count):
  q, k, v = heads()
  place = np.random.default_rng(1).uniform(size=(20, 5))
  want = formula(q, k, v, tokens(), place, count)
  assert np.any(want != formula(q, k, v, tokens(), place, N))
  agree(
    informer,
    (q, k, v),
    want,
    draw=given(samples=place),
    max_len=20,
    num_queries=count,
    num_samples=5,
  )


def test_informer_with_all_queries_is_softmax():
  q, k, v = heads()
  place = np.random.default_rng(1).uniform(size=(N, 3))
  agree(
    informer,
    (q, k, v),
    dense(q, k, v, tokens()[:, None]),
    draw=given(samples=place),
    max_len=N,
    num_queries=N,
    num_samples=3,
  )


def test_informer_counts_follow_max_len():
  asked = []

  def draw(name, make):
    asked.append(make(__import__("jax").random.key(0)).shape)
    return jnp.zeros(asked[-1])

  x = jnp.ones((1, 1, 4, 2))
  mask = jnp.ones((1, 4), bool)
  informer(x, x, x, mask=mask, dropout=Dropout(), draw=draw, max_len=4096)
  assert asked == [(4096, 42)]  # ceil(5 ln 4096)


@pytest.mark.parametrize(
  "options", [{"factor": 0.0}, {"num_queries": -1}, {"num_queries": 5}]
)
def test_informer_refuses_wrong_options(options):
  x, (option,) = jnp.ones((1, 1, 4, 2)), options
  call = functools.partial(
    informer, x, x, x, draw=None, dropout=None, max_len=4
  )
  with pytest.raises(ValueError, match=f"{option}={options[option]}"):
    call(mask=jnp.ones((1, 4), bool), **options)


def test_the_measure_by_blocks_is_that_of_the_loop():
  q, k = (draws.normal(i, (2, 3, 300, 8)) for i in (0, 1))
  index = jnp.asarray(np.random.default_rng(2).integers(0, 300, (2, 300, 17)))
  found = _measure_by_blocks(q, k, index)
  np.testing.assert_allclose(found, _measure(q, k, index), atol=1e-5)
