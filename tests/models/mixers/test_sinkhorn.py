import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.sinkhorn import sinkhorn, sort_weights
from tests import draws
from tests.models.mixers.oracle import (
  B,
  E,
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

SMALL = {"block_size": 4}


def tools(size, max_len=N, seed=3):
  """Returns the projection to be sorted by, W_2, and both as tools."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(B, H, N, E))
  kernel = rng.normal(size=(H, E, -(-max_len // size)))

  def project(name):
    return jnp.asarray(x, jnp.result_type(float))

  return x, kernel, dict(project=project, param=given(sort_kernel=kernel))


def expected(q, k, v, x, kernel, size, steps, temperature):
  """Sorts and attends block by block, in loops over samples and heads."""
  mask, y = tokens(), np.zeros_like(v)
  blocks = [np.arange(i, min(i + size, N)) for i in range(0, N, size)]
  for b in range(B):
    filled = [i for i, at in enumerate(blocks) if mask[b, at].any()]
    for h in range(H):
      # Normalise the weights of the blocks that have tokens.
      sums = [x[b, h, blocks[i]][mask[b, blocks[i]]].sum(0) for i in filled]
      logits = np.maximum(sums, 0) @ kernel[h][:, filled]
      p = np.exp(logits / temperature)
      for _ in range(steps):
        p = p / p.sum(1, keepdims=True)
        p = p / p.sum(0, keepdims=True)
      for row, i in enumerate(filled):
        at = blocks[i]
        keys, values = list(k[b, h, at]), list(v[b, h, at])
        shares = list(mask[b, at].astype(float))
        for s in range(size):
          # Average what the blocks with a token at this place have there.
          there = [
            (p[row, j], blocks[m][s])
            for j, m in enumerate(filled)
            if s < len(blocks[m]) and mask[b, blocks[m][s]]
          ]
          share = sum(w for w, _ in there)
          if share:
            keys.append(sum(w * k[b, h, t] for w, t in there) / share)
            values.append(sum(w * v[b, h, t] for w, t in there) / share)
            shares.append(share)
        with np.errstate(divide="ignore"):
          scores = q[b, h, at] @ np.array(keys).T / np.sqrt(E) + np.log(shares)
        y[b, h, at] = weigh(scores, np.array(shares) > 0) @ np.array(values)
  return y


@pytest.mark.parametrize(("size", "steps"), [(3, 5), (5, 1)])
def test_sinkhorn_attends_to_own_and_sorted_block(size, steps):
  q, k, v = heads()
  x, kernel, both = tools(size)
  want = expected(q, k, v, x, kernel, size, steps, temperature=0.5)
  options = dict(block_size=size, sort_steps=steps, temperature=0.5)
  agree(sinkhorn, (q, k, v), want, max_len=N, **both, **options)


def test_sinkhorn_with_one_block_is_softmax():
  q, k, v = heads()
  _, _, both = tools(64)
  want = dense(q, k, v, tokens()[:, None])
  agree(sinkhorn, (q, k, v), want, max_len=N, block_size=64, **both)


def test_sinkhorn_sorts_blocks_by_a_permutation():
  """Logits that ask for it sort each half of the tokens to the other half."""
  q, k, v = heads()
  mask = np.ones((B, N), bool)
  # The first block asks for the second one, and the second for the first.
  x = np.zeros((B, H, N, E))
  x[:, :, 0, 0] = x[:, :, N // 2, 1] = 100.0
  kernel = np.zeros((H, E, 2))
  kernel[:, 0, 1] = kernel[:, 1, 0] = 1.0
  both = dict(
    project=lambda name: jnp.asarray(x, jnp.result_type(float)),
    param=given(sort_kernel=kernel),
  )
  want = dense(q, k, v, mask[:, None])
  agree(sinkhorn, (q, k, v), want, mask, max_len=N, block_size=6, **both)


def test_sort_weights_are_doubly_stochastic_over_blocks_with_tokens():
  logits = draws.normal(0, (2, 1, 5, 5))
  filled = jnp.array([[True] * 5, [True, False, True, True, False]])
  p = np.asarray(sort_weights(logits, filled, 30))
  for b in range(2):
    at = np.flatnonzero(filled[b])
    inside = p[b, 0][np.ix_(at, at)]
    np.testing.assert_allclose(inside.sum(0), 1, atol=1e-5)
    np.testing.assert_allclose(inside.sum(1), 1, atol=1e-5)
    assert p[b].sum() == pytest.approx(len(at), abs=1e-4)
