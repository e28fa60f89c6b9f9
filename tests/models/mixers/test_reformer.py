import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models.mixers.reformer import buckets_of, factors_of, reformer
from tests import initial
from tests.models.mixers.oracle import (
  B,
  E,
  H,
  agree,
  given,
  heads,
  tokens,
  weigh,
)

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"chunk_size": 3, "num_buckets": 4}


def itself_last(q):
  """q . k with k of length 1, and -1e5 for a token with itself.

  As in Hugging Face's code: over the root of the mean square plus 1e-6, and
  then over that of e.
  """
  k = q / np.sqrt(np.square(q).mean(-1, keepdims=True) + 1e-6) / E**0.5
  scores = q @ k.swapaxes(-1, -2)
  return np.where(np.eye(q.shape[-2], dtype=bool), -1e5, scores)


def formula(q, v, mask, rotations, size, same_bucket=True, correct=True):
  """Every round's reach as a set; the rounds joined in one softmax."""
  rounds = rotations.shape[2]
  want = np.zeros_like(v)
  for b in range(B):
    at = np.flatnonzero(mask[b])
    for h in range(H):
      scores = itself_last(q[b, h])[np.ix_(at, at)]
      weights = 0
      for r in range(rounds):
        turned = q[b, h, at] @ rotations[h, :, r]
        bucket = np.concatenate([turned, -turned], -1).argmax(-1)
        rank = np.argsort(np.argsort(bucket, kind="stable"))
        chunk = rank // size
        away = chunk[:, None] - chunk[None]
        reach = (away == 0) | (away == 1)
        if same_bucket:
          reach = reach & (bucket[:, None] == bucket[None])
        weights = weights + np.where(reach, 1.0, 0)
      if correct:
        weights = np.minimum(weights, 1)
      scores = np.where(weights > 0, scores, -np.inf)
      scores = np.exp(scores - scores.max(-1, keepdims=True))
      scores = weights * scores
      want[b, h, at] = scores / scores.sum(-1, keepdims=True) @ v[b, h, at]
  return want


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("same_bucket", [True, False])
def test_reformer_is_its_formula(same_bucket, correct):
  n = 26
  q, v = heads(2, n=n)
  mask = tokens(n)
  mask[1, 9:15] = True
  rotations = np.random.default_rng(1).normal(size=(H, E, 3, 2))
  want = formula(q, v, mask, rotations, 4, same_bucket, correct)
  agree(
    reformer,
    (q, v),
    want,
    mask,
    draw=given(rotations=rotations),
    max_len=30,
    chunk_size=4,
    num_hashes=3,
    num_buckets=4,
    same_bucket=same_bucket,
    correct_duplicates=correct,
  )


def test_reformer_with_one_bucket_is_softmax_of_shared_keys():
  q, v = heads(2)
  want = weigh(itself_last(q), tokens()[:, None, None]) @ v
  options = {"num_buckets": 1, "num_hashes": 2, "chunk_size": 12}
  agree(reformer, (q, v), want, draw=None, max_len=12, **options)


def test_reformer_model_with_one_bucket_draws_no_hashes():
  """All hash rounds and all drawn keys give the same."""
  sizes = dict(vocab_size=9, max_len=8, num_classes=2, d_model=8, num_layers=1)
  ids = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8], [3, 2, 1, 4, 5, 0, 0, 0]])
  outputs = []
  for redraw in (True, False):
    mixer = {"num_buckets": 1, "chunk_size": 8, "redraw": redraw}
    model = models.build("reformer", mixer=mixer, **sizes)
    params = initial.params(model, ids)
    outputs.append(model.apply({"params": params}, ids, train=False))
  chex.assert_trees_all_close(*outputs, atol=0)
  with pytest.raises(UserError, match="seed=3.*redraw=False"):
    model = models.build("reformer", mixer=mixer | {"seed": 3}, **sizes)
    model.init(jax.random.key(0), ids, train=False)


def test_buckets_of_opposite_vectors_are_opposite():
  rotations = jnp.asarray(np.random.default_rng(0).normal(size=(H, E, 2, 3)))
  q = jnp.asarray(heads(1)[0], jnp.float32)
  one, other = (buckets_of(x, rotations, (6,)) for x in (q, -q))
  np.testing.assert_array_equal((one + 3) % 6, other)
  assert set(np.unique(one)) == set(range(6))


def test_buckets_of_many_buckets_combine_two_hashes():
  assert factors_of(6) == (6,)
  assert factors_of(128) == (128,)  # As in Hugging Face's code.
  assert factors_of(256) == (16, 16)
  assert factors_of(16, most=8) == (4, 4)
  assert factors_of(512) == (32, 16)
  rotations = jnp.asarray(np.random.default_rng(0).normal(size=(H, E, 2, 5)))
  q = jnp.asarray(heads(1)[0], jnp.float32)
  both = buckets_of(q, rotations, (4, 6))
  one = buckets_of(q, rotations[..., :2], (4,))
  other = buckets_of(q, rotations[..., 2:], (6,))
  np.testing.assert_array_equal(both, 6 * one + other)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_buckets": 5}, "num_buckets=5.*even"),
    ({"num_buckets": 200}, "num_buckets=200.*128"),
    ({"num_hashes": 0}, "num_hashes=0"),
    ({"chunk_size": 0}, "chunk_size=0"),
  ],
)
def test_reformer_refuses_wrong_options(options, message):
  x = jnp.ones((1, 1, 4, 2))
  call = functools.partial(reformer, x, x, draw=None, dropout=None, max_len=4)
  with pytest.raises(ValueError, match=message):
    call(mask=jnp.ones((1, 4), bool), **options)
