"""Residual layers around contractions: inverse, certificate, causality."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import lipschitz
from jaxformers.analysis.certificates.ascent import ascend
from jaxformers.models import inverse
from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.fixed_point import LENGTHS
from jaxformers.models.variables import make_variables, of_stack
from tests import draws, initial
from tests.assertions import assert_between
from tests.marks import long_except

FILTERS = ("allpass", "certified_s4d")
ATTENTION = ("injective_transformer", "l2_transformer")
NAMES = (*FILTERS, *ATTENTION)
SHORT = long_except((NAMES[0], NAMES[2]), NAMES)
WIDTH, LENGTH = 4, 6
IDS = draws.integers(0, (3, 12), 1, 20, end=7)


def build(name="allpass", *, causal=False, d_model=8, **options):
  return models.build(
    name,
    vocab_size=20,
    max_len=16,
    num_classes=3,
    d_model=d_model,
    num_layers=2,
    mixer={"causal": causal},
    embedding={"init_std": 1.0},
    **options,
  )


def stack(model, seed=0, alpha=1.5):
  """The layers, and weights whose a is near its greatest."""
  params = initial.params(model, IDS, seed=seed)["encoder"]
  for i in range(model.config.num_layers):
    params[f"layer_{i}"]["alpha"] = jnp.float32(alpha)
  variables = of_stack(make_variables(model, {"encoder": params}), "encoder")
  layers = invertible.layers_of(model.stacks()["encoder"])
  return layers, layers.weights(variables)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", long_except([True], [True, False]))
@pytest.mark.parametrize("a", long_except(["wide"], ["wide", "budget"]))
@pytest.mark.slow
def test_contractive_encoder_is_undone_to_its_tokens(name, causal, a):
  model = build(name, causal=causal, block={"a": a})
  params = initial.params(model, IDS)
  hidden, side = inverse.forward(model, params, IDS)
  x = inverse.inverse(model, params, hidden[-1], side)
  mask = np.asarray(side.mask)
  chex.assert_trees_all_close(
    np.asarray(x)[mask], np.asarray(hidden[0])[mask], atol=1e-5, rtol=0
  )
  found, _ = inverse.tokens(model, params, x)
  chex.assert_trees_all_equal(found[mask], np.asarray(IDS)[mask])


@pytest.mark.parametrize("name", long_except(FILTERS[:1], FILTERS))
@pytest.mark.parametrize("causal", long_except([True], [True, False]))
@pytest.mark.slow
def test_jacobians_have_singular_values_inside_the_certificate(name, causal):
  with jax.enable_x64(True):
    model = build(name, causal=causal, d_model=WIDTH)
    layers, weights = stack(model)
    layers = type(layers)(
      2, jnp.dtype("float64"), layers.block.clone(dtype=jnp.float64)
    )
    low, high = layers.certificate(weights[0], None, 1.0)["sequences"]
    mask = np.ones((1, LENGTH), bool)

    def flat(x):
      x = x.reshape(1, LENGTH, WIDTH)
      return layers.forward(weights[0], x, None, mask)[0].ravel()

    x = np.random.default_rng(0).normal(size=LENGTH * WIDTH)
    values = np.linalg.svd(jax.jit(jax.jacrev(flat))(x), compute_uv=False)
  assert_between(values, low, high, rtol=1e-6)
  # The bounds are not idle.
  assert values[0] > 1.3
  assert values[-1] < 0.75


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.slow
def test_ascent_finds_no_two_sequences_outside_the_certificate(name):
  """Two layers, any two sequences under a mask with a hole."""
  layers, both = stack(build(name))
  kind = "farthest" if name in ATTENTION else "sequences"
  low, high = np.prod([layers.certificate(w, None, 1.0)[kind] for w in both], 0)
  mask = np.arange(LENGTH)[None] < np.array([[LENGTH], [5]])
  mask &= np.arange(LENGTH)[None] != 2

  def ratio(points):
    ends = points["middle"] + points["step"], points["middle"]
    before = after = ends
    for w in both:
      after = [layers.forward(w, x, None, mask)[0] for x in after]

    def distance(pair):
      return LENGTHS[kind](jnp.where(mask[..., None], pair[0] - pair[1], 0))

    return distance(after) / distance(before)

  rng = np.random.default_rng(0)
  draw = functools.partial(rng.normal, size=(2, LENGTH, 8))
  start = {"middle": jnp.float32(draw()), "step": jnp.float32(draw())}
  run = jax.jit(functools.partial(ascend, ratio, steps=100))
  least, greatest = (run(start, sign=sign) for sign in (-1.0, 1.0))
  assert_between((least, greatest), low, high, rtol=1e-5)
  # The search comes near; two branches seldom meet in their worst cases.
  assert greatest.max() > high ** (0.4 if name in ATTENTION else 0.5)
  assert least.min() < low ** (0.15 if name in ATTENTION else 0.2)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.slow
def test_a_causal_encoder_is_undone_causally(name):
  """Later outputs, however they are changed, do not move earlier inputs."""
  layers, weights = stack(build(name, causal=True))
  mask = np.ones((1, LENGTH), bool)
  rng = np.random.default_rng(0)
  y = rng.normal(size=(1, LENGTH, 8)).astype(np.float32)
  other = y.copy()
  other[:, 4:] += 3
  one, two = (
    np.asarray(invertible.inverse(layers, weights[0], z, None, mask, None))
    for z in (y, other)
  )
  chex.assert_trees_all_close(one[:, :4], two[:, :4], atol=1e-5, rtol=0)
  assert np.abs(one[:, 4:] - two[:, 4:]).max() > 0.5
  back, _ = layers.forward(weights[0], two, None, mask)
  chex.assert_trees_all_close(back, other, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_contractive_language_model_keeps_the_certificate():
  """A causal TransJect whose tokens meet: injective between sequences."""
  model = models.build(
    "allpass",
    vocab_size=20,
    max_len=16,
    num_classes=0,
    objective="language_model",
    d_model=8,
    num_layers=2,
    embedding={"init_std": 1.0},
  )
  params = initial.params(model, IDS)
  forward = jax.jit(functools.partial(model.apply, train=False))
  log_p = forward({"params": params}, IDS)
  later = IDS.at[0, 8].set(IDS[0, 8] % 19 + 1)
  other = forward({"params": params}, later)
  chex.assert_trees_all_close(log_p[0, :8], other[0, :8], atol=1e-6, rtol=0)
  # Padding has probability 0.
  assert np.abs(log_p[0, 8:, 1:] - other[0, 8:, 1:]).max() > 1e-4
  rows = lipschitz.guaranteed(model, params, None, [1.0] * 2)
  low, high = lipschitz.product([row["sequences"] for row in rows])
  assert 0 < low < 1 < high


def test_contractive_certificate_width_follows_the_option():
  for a, bound in (("budget", 0.5), ("wide", 0.7)):
    width = {"a_max": 0.7} if a == "wide" else {}
    layers, weights = stack(build(block={"a": a, **width}))
    row = layers.certificate(weights[0], None, 1.0)
    chex.assert_trees_all_close(row["a"], bound * np.tanh(1.5), rtol=1e-4)
    want = (1 - row["a"]) ** 2, (1 + row["a"]) ** 2
    chex.assert_trees_all_close(row["sequences"], want, rtol=1e-4)
    assert row["a"] ** layers.max_steps() < np.finfo(np.float64).eps


def test_contractive_block_refuses_a_mixer_without_bound():
  block = models.BLOCKS["contractive"](models.MIXERS["softmax"], 2)
  with pytest.raises(ValueError, match=r"'contractive'.*certified_s4d"):
    block.invertible()
