import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.foundations import platforms
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.sparse import sparse
from jaxformers.training import programs
from jaxformers.training.layout import Layout
from tests import draws
from tests.models.mixers.oracle import N, agree, dense, heads, tokens

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"block_size": 4, "num_summary": 1}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "summary"), [(4, 1), (5, 2), (3, 0)])
def test_sparse_is_dense_attention_under_its_mask(size, summary, causal):
  i, j = np.arange(N)[:, None], np.arange(N)
  seen = (i // size == j // size) | (j % size >= size - summary)
  past = (j <= i) if causal else (j <= N)
  seen = seen & past & tokens()[:, None]
  seen = seen | (~tokens()[:, :, None] & (i == j))
  q, k, v = heads()
  options = {"block_size": size, "num_summary": summary, "causal": causal}
  agree(sparse, (q, k, v), dense(q, k, v, seen), **options)


def test_sparse_with_full_summary_is_softmax():
  q, k, v = heads()
  want = dense(q, k, v, tokens()[:, None])
  agree(sparse, (q, k, v), want, block_size=4, num_summary=4)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"num_summary": 65}])
def test_sparse_refuses_wrong_options(options):
  x, (option,) = jnp.ones((1, 1, 4, 2)), options
  call = functools.partial(sparse, x, x, x, dropout=None)
  with pytest.raises(ValueError, match=f"{option}={options[option]}"):
    call(mask=jnp.ones((1, 4), bool), **options)


def test_devices_of_tpus_drop_the_weights_of_their_rows(monkeypatch):
  """A draw in a loop over blocks would be exchanged between devices."""
  monkeypatch.setattr(platforms, "on_tpu", lambda: True)
  q, k, v = (draws.normal(i, (4, 2, 24, 4)) for i in range(3))
  dropout = Dropout(0.4, jax.random.key(7))

  def run(q, k, v):
    mask = jnp.ones((4, 24), bool)
    return sparse(
      q, k, v, mask=mask, dropout=dropout, block_size=4, num_summary=2
    )

  layout = Layout.of("data:4", jax.devices()[:4])
  placed = jax.device_put((q, k, v), layout.sharding("data"))
  lowered = jax.jit(layout.traced(run)).lower(*placed)
  assert "sdy.manual_computation" in lowered.as_text()
  program = lowered.compile()
  assert not programs.count(program.as_text()).collectives
  chex.assert_trees_all_close(program(*placed), run(q, k, v), atol=1e-5)
