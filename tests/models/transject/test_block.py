"""The modules that own TransJect's parameters."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxformers import models
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from tests import initial
from tests.models.transject.examples import build, encoder

SMALL = {"num_experts": 2}


@pytest.mark.parametrize(
  ("num_experts", "paper"), [(1, 6_616_844), (8, 28_679_948)]
)
@pytest.mark.slow
def test_parameters_are_those_of_table_3a_divided_by_ten(num_experts, paper):
  """The authors' classes less the biases of U, V and eigenvectors and gate."""
  model = models.build(
    "transject",
    vocab_size=185,
    max_len=4096,
    num_classes=2,
    d_model=512,
    num_layers=6,
    mixer={"num_experts": num_experts},
  )
  head = 512 * 2 + 2
  biases = 6 * num_experts * 2 * 512 + 512 + 6
  assert models.size(model) - head == paper - biases


def test_transject_makes_eigenvalues_once_and_carries_them():
  _, params, _ = encoder(3, 2, 0.5)
  has = [
    "basis_skew" in params["encoder"][f"layer_{i}"]["mixer"] for i in range(3)
  ]
  assert has == [True, False, False]


@pytest.mark.slow
def test_random_transject_learns_sigma_without_reconstruction_loss():
  model = models.build(
    "random_transject",
    vocab_size=9,
    max_len=9,
    num_classes=2,
    d_model=8,
    num_layers=2,
  )
  ids = jnp.ones((1, 5), jnp.int32)
  variables = model.init(jax.random.key(0), ids, train=False)
  assert "losses" not in variables
  assert variables["params"]["encoder"]["layer_0"]["mixer"]["sigma"].shape == (
    8,
  )


def test_transject_refuses_an_unknown_sigma():
  with pytest.raises(ValueError, match="sigma.*'noise'.*eigenvalues, learned"):
    encoder(1, 1, 0.5, sigma="noise")


def test_transject_refuses_an_unknown_gating():
  with pytest.raises(ValueError, match="gating.*'soft'.*certified.*paper"):
    build(2, 2, 8, gating="soft")


@pytest.mark.slow
def test_injective_block_shares_alpha_with_its_mixer():
  block = BLOCKS["injective"](
    functools.partial(MIXERS["transject"], num_experts=1), num_layers=2
  )
  x = jnp.ones((1, 3, 4))
  kw = {"mask": jnp.ones((1, 3), bool), "carry": None, "train": False}
  params = initial.params(block, x, **kw)
  assert params["residual"]["alpha"].shape == ()
  assert "residual" not in params["mixer"]
  y, _ = block.apply({"params": params}, x, **kw)
  chex.assert_trees_all_equal(x, y)
