"""What recurrent mixers share."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import recurrence
from tests.models.mixers import sequential

Y = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)


@pytest.mark.parametrize("form", recurrence.GLUS)
def test_gated_output_is_its_equation(form):
  gate = recurrence.GatedOutput(form, "gelu")
  params = gate.init(jax.random.key(0), Y, train=False).get("params", {})
  want = sequential.gated(form, sequential.gelu, params, Y)
  y = gate.apply({"params": params}, Y, train=False)
  np.testing.assert_allclose(y, want, atol=2e-6)


def test_gated_output_refuses_an_unknown_gate():
  with pytest.raises(ValueError, match="glu.*'half'.*full, half1, half2, none"):
    sequential.init(MIXERS["lru"](glu="half"), 4)


@pytest.mark.parametrize("name", ["lru", "s5", "s4d"])
@pytest.mark.slow
def test_recurrent_dropout_drops_channels_in_training_only(name):
  mixer = MIXERS[name](state_size=4, dropout_rate=0.5, glu="none")
  params = sequential.init(mixer, 4)
  kw = {"mask": jnp.ones((2, 5), bool), "carry": None}

  def run(train, key):
    rngs = {"dropout": jax.random.key(key)}
    y, _ = mixer.apply({"params": params}, Y, train=train, rngs=rngs, **kw)
    return np.asarray(y)

  np.testing.assert_array_equal(run(False, 0), run(False, 1))
  assert not np.allclose(run(True, 0), run(True, 1))
  # A channel is dropped at all tokens or none.
  dropped = run(True, 0) == 0
  assert (dropped == dropped[:, :1]).all() and dropped.any()


@pytest.mark.slow
def test_bidirectional_lru_sees_both_ends_from_everywhere():
  """A bidirectional mixer sees a change at either end from everywhere."""
  mixer = MIXERS["lru"](state_size=8, r_min=0.9, r_max=0.99)
  params = sequential.init(mixer, 4)
  kw = {"mask": jnp.ones((2, 5), bool), "carry": None, "train": False}
  y, _ = mixer.apply({"params": params}, Y, **kw)
  for at in (0, 4):
    moved = Y.copy()
    moved[:, at] += 1
    z, _ = mixer.apply({"params": params}, moved, **kw)
    assert (np.abs(z - y).max(-1) > 1e-4).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_one_by_one_are_one_product(dtype, monkeypatch):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 5, 6)), dtype)
  into = [jnp.asarray(rng.normal(size=(6, 3)), jnp.float32) for _ in range(4)]
  out = [jnp.asarray(rng.normal(size=(3, 6)), jnp.float32) for _ in range(4)]

  def run():
    parts = recurrence.products(x, into)
    return parts, recurrence.sum_products(parts, out)

  want = run()
  monkeypatch.setattr(recurrence.platforms, "on_tpu", lambda: True)
  found = run()
  assert found[1].dtype == dtype
  error = 1e-5 if dtype == jnp.float32 else 0.1
  chex.assert_trees_all_close(found, want, atol=error, rtol=0)
  # Sums are rounded once.
  exact = sum(
    np.asarray(p, np.float64) @ np.asarray(r.astype(dtype), np.float64)
    for p, r in zip(found[0], out, strict=True)
  )
  assert recurrence._are_apart([jnp.ones((128, 128))])
  assert not recurrence._are_apart([jnp.ones((129, 1))])
  rounded = jnp.asarray(exact, dtype).astype(jnp.float32)
  assert abs(found[1].astype(jnp.float32) - rounded).max() < error / 2
