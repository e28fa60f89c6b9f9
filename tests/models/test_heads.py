import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.heads import POOLS, ClassifierHead


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_a_pool_reads_tokens_only(pool, strict):
  x = jax.random.normal(jax.random.key(0), (2, 5, 3))
  mask = jnp.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
  a, b = (
    POOLS[pool](jnp.where(mask[..., None], x, pad), mask) for pad in (-9.0, 9.0)
  )
  chex.assert_trees_all_equal(a, b)
  chex.assert_trees_all_equal(a[1], jnp.zeros(3))
  want = {"max": x[0, :3].max(0), "mean": x[0, :3].mean(0), "first": x[0, 0]}
  chex.assert_trees_all_close(a[0], want[pool], atol=1e-6)


@pytest.mark.parametrize("head_dim", [0, 7])
def test_logits_are_float32(head_dim, strict):
  head = ClassifierHead(num_classes=4, pool="mean", head_dim=head_dim)
  x, mask = jnp.ones((2, 5, 3), jnp.bfloat16), jnp.ones((2, 5), bool)
  logits, variables = head.init_with_output(jax.random.key(0), x, mask)
  chex.assert_shape(logits, (2, 4))
  assert logits.dtype == np.float32
  assert ("hidden" in variables["params"]) == bool(head_dim)
