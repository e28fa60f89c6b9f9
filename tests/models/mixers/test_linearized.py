import numpy as np
import pytest

from jaxformers.models.mixers.linear import CHUNK
from jaxformers.models.mixers.linearized import linearized
from tests.models.mixers.oracle import agree, heads, tokens

SMALL = {"scale": 1 / 17}


@pytest.mark.parametrize("causal", [False, True])
def test_linearized_is_its_formula(causal):
  n = 2 * CHUNK + 3 if causal else 12
  q, k, v = heads(n=n)
  seen = tokens(n)[:, None, None]
  if causal:
    seen = seen & np.tril(np.ones((n, n), bool))
  scores = np.where(seen, q @ k.swapaxes(-1, -2), 0)
  want = 0.5 * scores @ v
  agree(linearized, (q, k, v), want, atol=1e-4, causal=causal, scale=0.5)
