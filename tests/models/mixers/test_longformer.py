import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.longformer import longformer
from tests.models.mixers.oracle import N, agree, dense, given, heads, tokens

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"window": 4}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_global", [0, 1, 3])
@pytest.mark.parametrize("window", [4, 6])
def test_longformer_is_dense_attention_under_its_mask(
  window, num_global, causal
):
  i, j = np.arange(N)[:, None], np.arange(N)
  seen = (np.abs(i - j) <= window // 2) | (j < num_global)
  past = (j <= i) if causal else (j <= N)
  keys = tokens()[:, None]
  q, k, v, *own = heads(6)
  spare = ~tokens()[:, :, None] & (i == j)
  want = dense(q, k, v, (seen & past & keys) | spare)
  top = dense(*own, (past & keys) | spare)
  want[:, :, :num_global] = top[:, :, :num_global]
  names = ("query_global", "key_global", "value_global")
  agree(
    longformer,
    (q, k, v),
    want,
    project=given(**dict(zip(names, own, strict=True))),
    window=window,
    num_global=num_global,
    causal=causal,
  )


def test_longformer_with_a_full_window_is_softmax():
  q, k, v = heads()
  want = dense(q, k, v, tokens()[:, None])
  agree(longformer, (q, k, v), want, project=None, window=2 * N, num_global=0)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"window": 3}, "window=3.*even"),
    ({"window": 0}, "window=0"),
    ({"num_global": -1}, "num_global=-1"),
  ],
)
def test_longformer_refuses_wrong_options(options, message):
  x = jnp.ones((1, 1, 4, 2))
  call = functools.partial(longformer, x, x, x, project=None, dropout=None)
  with pytest.raises(ValueError, match=message):
    call(mask=jnp.ones((1, 4), bool), **options)
