"""Fidelity to the first layer's values, symmetric attention, FeatScale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.tokens import smoothness
from jaxformers.models.capture import capture
from jaxformers.models.mixer import MIXERS
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.marks import long_except

MASK = jnp.arange(9)[None] < jnp.array([[9], [6]])
X, Z = (draws.normal(i, (2, 9, 8)) for i in (0, 1))
SIZES = {"local": {"block_size": 4}, "nystromformer": {"num_landmarks": 3}}
VALUED = ["kernelized", "linear", "local", "nystromformer", "softmax"]


def mixer(name, **options):
  own = SIZES.get(name, {}) | options
  return MIXERS[name](num_heads=2, max_len=9, **own)


def init(layer, carry=None):
  return initial.params(layer, X, mask=MASK, carry=carry, seed=2)


def apply(layer, params, x, carry=None, mask=MASK):
  return layer.apply({"params": params}, x, mask=mask, carry=carry, train=False)


@pytest.mark.parametrize("name", VALUED)
@pytest.mark.slow
def test_neutreno_without_fidelity_equals_softmax_bitwise(name):
  plain, none = mixer(name), mixer(name, fidelity=0.0)
  params = init(plain)
  chex.assert_trees_all_equal(init(none), params)
  first, carry = apply(none, params, X)
  chex.assert_trees_all_equal(first, apply(plain, params, X)[0])
  chex.assert_trees_all_equal(
    apply(none, params, Z, carry)[0], apply(plain, params, Z)[0]
  )


@pytest.mark.parametrize("name", VALUED)
def test_neutreno_term_uses_the_first_layers_values(name):
  plain, faithful = mixer(name), mixer(name, fidelity=0.6)
  params = init(plain)
  y, carry = apply(faithful, params, X)
  chex.assert_trees_all_close(y, apply(plain, params, X)[0], atol=1e-6)
  value = params["value"]

  def values(x):
    return jnp.einsum("bnd,dhe->bnhe", x, value["kernel"]) + value["bias"]

  chex.assert_trees_all_close(carry.values, values(X).swapaxes(1, 2), atol=1e-5)
  term = jnp.einsum(
    "bnhe,hed->bnd", 0.6 * (values(X) - values(Z)), params["out"]["kernel"]
  )
  for _ in range(2):  # The third layer's is the first's, too.
    y, carry = apply(faithful, params, Z, carry)
    want = apply(plain, params, Z)[0] + term
    chex.assert_trees_all_close(y, want, atol=2e-5)


def test_causal_neutreno_sees_no_later_token():
  layer = mixer("softmax", causal=True, fidelity=0.6)
  params = init(layer)

  def two(x):
    y, carry = apply(layer, params, x, mask=MASK | True)
    return apply(layer, params, y, carry, MASK | True)[0]

  moved = jnp.any(two(X) != two(X.at[:, 5].add(1.0)), (0, 2))
  assert not moved[:5].any()
  assert moved[5:].all()


@pytest.mark.slow
def test_neutreno_lambda_is_learned_or_scheduled():
  first = mixer("softmax", fidelity=0.5, learn_fidelity=True)
  _, carry = apply(first, init(first), X)
  assert "fidelity" not in init(first)  # The first layer has no term.
  params = init(first, carry)
  assert params["fidelity"] == 0.5
  slope = jax.grad(lambda p: apply(first, p, Z, carry)[0].sum())(params)
  assert slope["fidelity"] != 0
  scheduled = mixer("softmax", fidelity=1.0, fidelity_schedule=(0.2, 0.4))
  params = init(mixer("softmax"))
  _, carry = apply(scheduled, params, X)
  for weight in (0.2, 0.4, 0.4):
    constant = mixer("softmax", fidelity=weight)
    want = apply(constant, params, Z, carry)[0]
    y, carry = apply(scheduled, params, Z, carry)
    chex.assert_trees_all_close(y, want, atol=1e-6)


def test_symmetric_attention_uses_keys_as_queries():
  layer = mixer("softmax", symmetric=True)
  params = init(layer)
  assert sorted(params) == ["key", "out", "value"]
  both = params | {"query": params["key"]}
  chex.assert_trees_all_close(
    apply(layer, params, X), apply(mixer("softmax"), both, X), atol=1e-6
  )


def test_normalised_gaussian_kernel_has_rows_of_sum_one():
  layer = mixer("kernelized", normalize=True)
  params = init(layer)
  ones = jax.tree.map(jnp.zeros_like, params["value"]) | {
    "bias": jnp.ones((2, 4))
  }
  out = {"kernel": jnp.ones((2, 4, 8)) / 8, "bias": jnp.zeros(8)}
  y, _ = apply(layer, params | {"value": ones, "out": out}, X)
  np.testing.assert_allclose(y, 1, atol=1e-5)


def test_feat_scale_scales_mean_and_deviation_separately():
  layer, plain = mixer("softmax", feat_scale=True), mixer("softmax")
  params = init(layer)
  own = {k: params.pop(k) for k in list(params) if "feat" in k}
  assert all(not p.any() for p in own.values())
  y = apply(plain, params, X)[0]
  chex.assert_trees_all_equal(apply(layer, params | own, X)[0], y)
  low, high = jnp.arange(8.0), 0.1 * jnp.ones(8)
  own = {"feat_scale_mean": low, "feat_scale_rest": high}
  found = apply(layer, params | own, X)[0]
  for b, n in enumerate([9, 6]):
    mean = y[b, :n].mean(0)
    want = y[b, :n] + low * mean + high * (y[b, :n] - mean)
    np.testing.assert_allclose(found[b, :n], want, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("synthesizer", {"symmetric": True}, r"symmetric=True.*\bk\b.*\bq\b"),
    ("softmax", {"fidelity": -0.1}, "fidelity=-0.1"),
    (
      "softmax",
      {"feat_scale": True, "causal": True},
      "feat_scale=True.*causal=True",
    ),
    ("softmax", {"fidelity": "0.6"}, "fidelity='0.6'.*float"),
  ],
)
def test_neutreno_refuses_wrong_options(name, options, message):
  with pytest.raises(ValueError, match=message):
    init(mixer(name, **options))


def build(num_layers, fidelity):
  return models.build(
    "neutreno",
    vocab_size=50,
    max_len=40,
    num_classes=2,
    d_model=32,
    num_layers=num_layers,
    mixer={"num_heads": 4, "fidelity": fidelity, "learn_fidelity": True},
  )


def test_neutreno_model_has_lambda_of_the_papers_vision_runs():
  kw = {"vocab_size": 9, "max_len": 9, "num_classes": 2, "d_model": 8}
  model = models.build("neutreno", num_layers=2, mixer={"num_heads": 2}, **kw)
  block = model.stacks()["encoder"]
  assert block.mixer(parent=None).fidelity == 0.6


@pytest.mark.parametrize("num_layers", long_except((12,), (12, 24)))
@pytest.mark.slow
def test_neutreno_lambda_makes_untrained_tokens_less_alike(num_layers):
  """With inflated weights softmax attention makes tokens alike."""
  ids = draws.integers(0, (4, 40), 1, 50)
  model = build(num_layers, 0.6)
  params = initial.params(model, ids, seed=1)
  params = jax.tree.map(lambda p: 2 * p if p.ndim > 1 else p, params)

  @jax.jit  # Once, for lambda is a parameter.
  def alike(fidelity):
    own = {
      name: layer | {"mixer": layer["mixer"] | {"fidelity": fidelity}}
      for name, layer in params["encoder"].items()
      if "fidelity" in layer.get("mixer", {})
    }
    moved = params | {"encoder": params["encoder"] | own}
    found = capture(model, make_variables(model, moved), ids)
    return smoothness.cosine_similarity(found.hidden[-1], found.mask).mean()

  found = [float(alike(fidelity)) for fidelity in (0.0, 0.4, 0.6, 1.0)]
  assert found == sorted(found, reverse=True)
  assert found[-1] < found[0] - 0.1
