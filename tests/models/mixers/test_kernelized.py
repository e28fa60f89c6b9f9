import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.kernelized import gaussian, kernelized
from tests.models.mixers.oracle import E, N, agree, heads, tokens

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.


@pytest.mark.parametrize("causal", [False, True])
def test_kernelized_is_its_formula(causal):
  q, k, v = heads()
  seen = tokens()[:, None, None]
  if causal:
    seen = seen & np.tril(np.ones((N, N), bool))
  far = np.square(q[..., :, None, :] - k[..., None, :, :]).sum(-1)
  want = np.where(seen, np.exp(-far / 2 / E**0.5), 0) @ v
  agree(kernelized, (q, k, v), want, causal=causal)


def test_kernelized_with_equal_queries_and_keys_sums_the_values():
  """Exact where dense attention is: no distances, so weights 1, not 1 / n."""
  q, _, v = heads()
  q = np.broadcast_to(q[:, :, :1], q.shape)
  total = (v * tokens()[:, None, :, None]).sum(2, keepdims=True)
  agree(kernelized, (q, q, v), np.broadcast_to(total, v.shape))


def test_gaussian_kernel_is_at_most_one():
  for scale in (1e3, 1e5):
    x = jnp.asarray(scale * heads(1)[0], jnp.float32)
    weights = gaussian(x, x)
    assert (weights >= 0).all()
    assert weights.max() <= 1
