import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.bigbird import bigbird, random_blocks
from tests import draws
from tests.models.mixers.oracle import H, agree, dense, given, heads, tokens

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"block_size": 3, "num_random": 1}


def graph(order, last, blocks, count):
  """The blocks that a block sees beside first and last: by hand."""
  seen = np.zeros((blocks, blocks), bool)
  for i in range(blocks):
    free = [j for j in range(1, last) if abs(i - j) > 1]
    best = sorted(free, key=lambda j: -order[i, j])[:count]
    seen[i, [*best, 0, last]] = True
    seen[i, max(i - 1, 0) : i + 2] = True
  seen[[0, last]] = True
  return seen


@pytest.mark.parametrize("count", [0, 1, 2])
def test_bigbird_is_dense_attention_under_its_graph(count):
  n, size, blocks = 30, 3, 10
  mask = np.ones((2, n), bool)
  mask[1, 4] = mask[1, 22:] = False  # The last block with a token is the 8th.
  order = np.random.default_rng(1).uniform(size=(H, 12, 12))
  q, k, v = heads(n=n)
  want = np.zeros_like(v)
  for b, last in enumerate((9, 7)):
    for h in range(H):
      seen = graph(order[h], last, blocks, count)
      seen = np.kron(seen, np.ones((size, size), bool)) & mask[b]
      both = dense(q, k, v, seen | np.eye(n, dtype=bool))
      want[b, h] = both[b, h]
  agree(
    bigbird,
    (q, k, v),
    want,
    mask,
    draw=given(order=order),
    max_len=36,
    block_size=size,
    num_random=count,
  )


def test_bigbird_with_all_random_blocks_is_softmax():
  q, k, v = heads(n=30)
  mask = tokens(30)
  want = dense(q, k, v, mask[:, None])
  draw = given(order=np.random.default_rng(1).uniform(size=(H, 10, 10)))
  options = {"block_size": 3, "num_random": 10, "max_len": 30}
  agree(bigbird, (q, k, v), want, mask, draw=draw, **options)


def test_random_blocks_are_neither_near_nor_global_nor_padding():
  order = draws.uniform(0, (2, 16, 16))
  index, counts = random_blocks(order, jnp.array([12, 3]), 14, 3)
  i = np.arange(14)[None, None, :, None]
  for b, last in enumerate((12, 3)):
    drawn = np.asarray(index)[b][np.asarray(counts)[b]]
    assert drawn.min() > 0
    assert drawn.max() < last
  assert (np.abs(index - i) > 1)[np.asarray(counts)].all()
  assert counts[0].all()  # A window leaves enough among thirteen blocks.
  assert len({tuple(np.ravel(head)) for head in index[0]}) == 2


@pytest.mark.parametrize("options", [{"block_size": 0}, {"num_random": -1}])
def test_bigbird_refuses_wrong_options(options):
  x, (option,) = jnp.ones((1, 1, 4, 2)), options
  call = functools.partial(bigbird, x, x, x, dropout=None, draw=None, max_len=4)
  with pytest.raises(ValueError, match=f"{option}={options[option]}"):
    call(mask=jnp.ones((1, 4), bool), **options)
