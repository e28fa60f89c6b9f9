import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.models.norm import LayerNorm
from tests import draws, initial


@pytest.mark.parametrize("use_norm", [False, True])
@pytest.mark.slow
def test_rezero_block_starts_as_identity_and_is_its_formula(use_norm):
  """x + r F(x), one r for both branches, with no LayerNorm unless asked."""
  block = BLOCKS["rezero"](
    MIXERS["softmax"], num_layers=1, mlp_dim=6, use_norm=use_norm
  )
  x = draws.normal(0, (1, 3, 4))
  kw = {"mask": jnp.ones((1, 3), bool), "carry": None, "train": False}
  params = initial.params(block, x, seed=1, **kw)
  y, _ = block.apply({"params": params}, x, **kw)
  chex.assert_trees_all_equal(x, y)
  assert ("norm_mlp" in params) == use_norm
  params |= {"residual": jnp.float32(0.3)}
  norm = lambda x: x  # noqa: E731
  if use_norm:
    norm = functools.partial(jax.nn.standardize, epsilon=1e-5)
  mixer = MIXERS["softmax"]()
  y, _ = mixer.apply({"params": params["mixer"]}, norm(x), **kw)
  want = x + 0.3 * y
  up, down = params["up"], params["down"]
  y = jax.nn.gelu(norm(want) @ up["kernel"] + up["bias"], approximate=False)
  want = want + 0.3 * (y @ down["kernel"] + down["bias"])
  got, _ = block.apply({"params": params}, x, **kw)
  chex.assert_trees_all_close(got, want, atol=1e-5)


def test_averaged_block_is_its_formula():
  """Newhouse et al. 2025: averages, scores divided by e, no biases."""
  options = {"use_bias": False, "exponent": 1.0}
  block = BLOCKS["averaged"](
    functools.partial(MIXERS["softmax"], **options), num_layers=3, mlp_dim=6
  )
  x = draws.normal(0, (1, 5, 4))
  kw = {"mask": jnp.ones((1, 5), bool), "carry": None, "train": False}
  params = initial.params(block, x, seed=1, **kw)
  assert {*params["up"]} == {*params["mixer"]["out"]} == {"kernel"}
  q, k, v = (
    jnp.einsum("bnd,dhe->bhne", x, params["mixer"][name]["kernel"])
    for name in ("query", "key", "value")
  )
  weights = jax.nn.softmax(q @ k.swapaxes(2, 3) / 2, -1)  # e = 2.
  y = jnp.einsum("bhne,hed->bnd", weights @ v, params["mixer"]["out"]["kernel"])
  want = 5 / 6 * x + y / 6 / 3
  up, down = params["up"]["kernel"], params["down"]["kernel"]
  y = jax.nn.gelu(want @ up, approximate=False) @ down
  want = 5 / 6 * want + y / 6 / 1.13
  got, _ = block.apply({"params": params}, x, **kw)
  chex.assert_trees_all_close(got, want, atol=1e-5)
  with pytest.raises(ValueError, match=r"norm_type 'layer'.*none"):
    block.clone(norm_type="layer").apply({"params": params}, x, **kw)


def test_pre_norm_dropout_acts_in_training_only():
  block = BLOCKS["pre_norm"](MIXERS["softmax"], num_layers=1, dropout_rate=0.5)
  x = draws.normal(0, (1, 3, 4))
  kw = {"mask": jnp.ones((1, 3), bool), "carry": None}
  variables = {"params": initial.params(block, x, **kw)}
  rngs = {"dropout": jax.random.key(1)}
  still = block.apply(variables, x, **kw, train=False)[0]
  moved = block.apply(variables, x, **kw, train=True, rngs=rngs)[0]
  assert not np.allclose(still, moved)


def test_layer_norm_is_near_that_of_transjects_baselines():
  """Theirs divides by the unbiased deviation plus 1e-6 (docs/mixers.md)."""
  x = np.array([[[1.0, 2.0, 5.0, 9.0]]])
  norm = LayerNorm()
  y, _ = norm.init_with_output(jax.random.key(0), jnp.asarray(x, jnp.float32))
  centred = x - x.mean()
  np.testing.assert_allclose(y, centred / np.sqrt(x.var() + 1e-5), rtol=1e-5)
  theirs = centred / (x.std(ddof=1) + 1e-6)
  np.testing.assert_allclose(y / theirs, np.sqrt(4 / 3), rtol=1e-4)


@pytest.mark.slow
def test_gated_block_drops_the_mega_update_once():
  """The mixer drops its h; the block drops after the feed-forward alone."""
  x = draws.normal(0, (2, 5, 8))
  kw = {"mask": jnp.ones((2, 5), bool), "carry": None}
  make = functools.partial(MIXERS["mega"], max_len=5)
  block = BLOCKS["gated"](make, num_layers=1, mlp_dim=6, dropout_rate=0.9)
  params = initial.params(block, x, seed=1, **kw)
  # Without the feed-forward's second layer nothing is left to drop.
  params["down"] = jax.tree.map(jnp.zeros_like, params["down"])
  still, _ = block.apply({"params": params}, x, train=False, **kw)
  rngs = {"dropout": jax.random.key(2)}
  dropped, _ = block.apply({"params": params}, x, train=True, rngs=rngs, **kw)
  chex.assert_trees_all_close(still, dropped, atol=1e-6)
