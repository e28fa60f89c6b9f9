"""Dropout drops as many entries as asked for, in all places alike."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import dropout as module
from jaxformers.models.dropout import Dropout, draw_kept, make_dropout
from tests import draws
from tests.marks import slow_except


@pytest.fixture(params=[False, True], ids=["cpu", "tpu"])
def _devices(request, monkeypatch):
  """Bytes side by side, and the form for TPUs."""
  monkeypatch.setattr(module, "_fills_lanes", lambda n: request.param)


def test_bytes_of_a_tpu_need_no_copies_if_words_fill_its_vectors(monkeypatch):
  assert not module._fills_lanes(512)
  monkeypatch.setattr(module.platforms, "on_tpu", lambda: True)
  assert [module._fills_lanes(n) for n in (64, 512, 640, 1_024)] == [
    False,
    True,
    False,
    True,
  ]


@pytest.mark.parametrize(
  "rate", slow_except([0.1], [0.001, 0.1, 0.25, 0.5, 0.999])
)
@pytest.mark.usefixtures("_devices")
@pytest.mark.parametrize("n", [1, 6, 64])
def test_draw_kept_drops_entries_at_the_rate(rate, n):
  """Over the keys; one threshold alone would miss most rates by much more."""
  keys = jax.random.split(jax.random.key(n), 2_000)
  shape = (1_000 // n, n)
  kept = jax.jit(jax.vmap(lambda key: draw_kept(key, rate, shape)))(keys)
  # Five deviations: of independent entries, and of the threshold of a key.
  total = kept.size
  variance = rate * (1 - rate) / total + (1 / 512) ** 2 / len(keys)
  assert abs(1 - kept.mean() - rate) < 5 * variance**0.5
  # No key has a rate that is further away than a step of the threshold.
  share = np.asarray(1 - kept.reshape(len(keys), -1).mean(1))
  deviation = (max(rate * (1 - rate), 1e-2) / (total // len(keys))) ** 0.5
  assert abs(share - rate).max() < 1 / 256 + 6 * deviation


@pytest.mark.usefixtures("_devices")
def test_draw_kept_entries_are_independent():
  key = jax.random.fold_in(jax.random.key(0), 1)
  kept = np.asarray(draw_kept(key, 0.3, (100_000, 7)))
  # Neither columns, nor a row and the next, are correlated.
  columns = np.corrcoef(kept.T) - np.eye(7)
  assert abs(columns).max() < 0.02
  pairs = np.corrcoef(kept[:-1].ravel(), kept[1:].ravel())[0, 1]
  assert abs(pairs) < 0.01


def test_draw_kept_does_not_depend_on_the_axes_of_rows():
  key = jax.random.key(0)
  kept = draw_kept(key, 0.3, (120, 7))
  for rows in ((2, 60), (2, 3, 4, 5), (2, 3, 1, 2, 10), (120, 1)):
    chex.assert_trees_all_equal(
      draw_kept(key, 0.3, (*rows, 7)), kept.reshape(*rows, 7)
    )
  assert draw_kept(key, 0.3, (7,)).shape == (7,)


def test_dropout_scales_kept_entries_and_zeroes_gradients_of_dropped():
  x = draws.normal(0, (2, 3, 50))
  dropout = Dropout(0.2, jax.random.key(1))
  y, pull = jax.vjp(dropout, x)
  kept = y != 0
  chex.assert_trees_all_close(y, jnp.where(kept, x / 0.8, 0))
  chex.assert_trees_all_close(
    pull(jnp.ones_like(y))[0], jnp.where(kept, 1 / 0.8, 0)
  )
  assert dropout(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
  # Another part of the array has another mask.
  assert (kept != (dropout.fold(1)(x) != 0)).any()


@pytest.mark.slow
def test_make_dropout_has_a_new_key_for_every_call():
  class Twice(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x, train):
      return tuple(
        make_dropout(self, self.rate, train=train)(x) for _ in range(2)
      )

  x = jnp.ones((4, 16))
  rngs = {"dropout": jax.random.key(0)}
  first, second = Twice(0.5).apply({}, x, True, rngs=rngs)
  assert (first != second).any()
  # Without a key, nothing is dropped outside training or at rate 0.
  for rate, train in ((0.5, False), (0.0, True)):
    chex.assert_trees_all_equal(Twice(rate).apply({}, x, train), (x, x))
  with pytest.raises(ValueError, match=r"dropout_rate=1.0.*\[0, 1\)"):
    Twice(1.0).apply({}, x, True)
