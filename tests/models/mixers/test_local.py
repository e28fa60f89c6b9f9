import numpy as np
import pytest

from jaxformers.models.mixers.local import local
from tests.models.mixers.oracle import N, agree, dense, heads, tokens

SMALL = {"block_size": 4}


@pytest.mark.parametrize(("size", "causal"), [(5, False), (5, True), (3, True)])
def test_local_is_dense_attention_under_its_mask(size, causal):
  i, j = np.arange(N)[:, None], np.arange(N)
  seen = (i // size == j // size) & tokens()[:, None]
  if causal:
    seen = seen & (j <= i)
  q, k, v = heads()
  seen = seen | (~tokens()[:, :, None] & (i == j))  # Any, where none is.
  agree(local, (q, k, v), dense(q, k, v, seen), block_size=size, causal=causal)


def test_local_with_one_block_is_softmax():
  q, k, v = heads()
  agree(local, (q, k, v), dense(q, k, v, tokens()[:, None]), block_size=64)
