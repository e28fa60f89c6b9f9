"""Coupled layers: every mixer undone, and trained without activations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import lipschitz
from jaxformers.models import inverse
from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.coupled import Coupled
from tests import draws, initial
from tests.assertions import assert_between
from tests.marks import long_except, slow_except
from tests.models.mixers.oracle import small_sizes

MIXED = sorted(name for name, kind in models.MODELS.items() if kind.mixer)
# A state, and a value that is handed on.
SHORT = ("neutreno", "s5")
IDS = draws.integers(0, (3, 17), 1, 20, end=7)


def build(name, memory="stored", num_layers=3, mixer=None, **options):
  mixer = small_sizes(models.MODELS[name].mixer) if mixer is None else mixer
  options = {"d_model": 16, "max_len": 17} | options
  return models.build(
    name,
    vocab_size=20,
    num_classes=3,
    num_layers=num_layers,
    memory=memory,
    coupled=True,
    mixer=mixer,
    **options,
  )


def moved(model, ids=IDS):
  """Parameters away from the start."""
  params = initial.params(model, ids)

  def move(a):
    step = np.random.default_rng(a.size).normal(size=a.shape)
    return np.asarray(a) + (0.05 * step).astype(a.dtype)

  return jax.device_put(jax.tree.map(move, params))


@pytest.mark.parametrize("name", slow_except(("s5",), MIXED, SHORT))
def test_every_mixer_is_undone(name):
  """To float32: 1e-5 of the largest entry, three layers and a mask."""
  model = build(name)
  params = moved(model)
  hidden, side = inverse.forward(model, params, IDS)
  x = inverse.inverse(model, params, hidden[-1], side)
  mask = np.asarray(side.mask)
  size = np.abs(hidden[-1])[mask].max()
  chex.assert_trees_all_close(
    x[mask], hidden[0][mask], atol=1e-5 * size, rtol=0
  )
  assert np.abs(hidden[-1] - hidden[0])[mask].max() > 0.1
  found, _ = inverse.tokens(model, params, x)
  chex.assert_trees_all_equal(found[mask], np.asarray(IDS)[mask])


def test_a_layer_is_undone_in_float64_to_rounding():
  """Of a layer that maps halves as the formula says."""
  with jax.enable_x64(True):
    model = build("s5", num_layers=1)
    layers = invertible.require_layers(model.stacks()["encoder"])
    params = jax.tree.map(np.float64, moved(model)["encoder"])
    (weights,) = layers.weights({"params": params})
    x = draws.normal(1, (2, 17, 16), float)
    mask = jnp.arange(17)[None] < jnp.array([[17], [9]])
    forward = jax.jit(lambda x: layers.forward(weights, x, None, mask))
    y, side = forward(x)
    back = jax.jit(layers.inverse)(weights, y, None, mask, side)
    # The first half has changed by the second, the second by the new first.
    other, _ = forward(x.at[..., :8].add(1.0))
  chex.assert_trees_all_close(back[0], x[0], atol=1e-12, rtol=0)
  chex.assert_trees_all_close(
    other[..., :8] - y[..., :8], 1.0, atol=1e-12, rtol=0
  )


def loss(params, model, key):
  y, sown = model.apply(
    {"params": params},
    IDS,
    train=True,
    rngs={"dropout": key},
    mutable=["losses"],
  )
  return jnp.square(y).sum() + sum(leaf.sum() for leaf in jax.tree.leaves(sown))


@pytest.mark.parametrize(
  "name",
  slow_except(
    ["transformer"],
    ["transformer", "neutreno", "transject"],
    ["transformer", "transject"],
  ),
)
@pytest.mark.slow
def test_coupled_reversible_gradients_equal_stored_gradients(name):
  """Without dropout, whose masks are others; losses of a mixer included."""
  params = moved(build(name))
  grads = {}
  for memory in ("stored", "reversible"):
    grad = jax.grad(
      functools.partial(loss, model=build(name, memory), key=jax.random.key(0))
    )
    grads[memory] = jax.jit(grad)(params)
  for want, got in zip(*map(jax.tree.leaves, grads.values()), strict=True):
    scale = max(float(jnp.abs(want).max()), 1e-2)
    chex.assert_trees_all_close(got, want, atol=2e-4 * scale, rtol=0)


@pytest.mark.slow
def test_dropout_is_drawn_alike_in_both_directions():
  """The gradient of a loop that undoes is that of one that recomputes."""
  mixer = {"dropout_rate": 0.3}
  make = functools.partial(
    build, "transformer", mixer=mixer, block={"dropout_rate": 0.2}
  )
  params = moved(make())
  grads, values = {}, {}
  for memory in ("recomputed", "reversible"):
    run = functools.partial(loss, model=make(memory))
    grad = jax.jit(jax.value_and_grad(run))
    value, grads[memory] = grad(params, key=jax.random.key(3))
    values[memory] = float(value)
  chex.assert_trees_all_close(
    values["recomputed"], values["reversible"], rtol=1e-5
  )
  other, _ = grad(params, key=jax.random.key(4))
  assert abs(float(other) - values["reversible"]) > 1e-3
  for want, got in zip(*map(jax.tree.leaves, grads.values()), strict=True):
    scale = max(float(jnp.abs(want).max()), 1e-2)
    chex.assert_trees_all_close(got, want, atol=2e-4 * scale, rtol=0)


@pytest.mark.parametrize("depth", long_except((4,), (4, 24, 96)))
@pytest.mark.slow
def test_rounding_grows_slowly_with_depth(depth):
  """Every layer adds the rounding of its sums: less than depth * 1e-6."""
  model = build("s5", num_layers=depth, memory="reversible")
  params = initial.params(model, IDS)
  hidden, side = inverse.forward(model, params, IDS)
  x = inverse.inverse(model, params, hidden[-1], side)
  mask = np.asarray(side.mask)
  off = np.abs(x - hidden[0])[mask].max() / np.abs(hidden[-1])[mask].max()
  assert off < 1e-6 * depth


@pytest.mark.slow
def test_coupled_layers_have_no_certificate():
  model = build("transformer")
  report = lipschitz.measure_encoder(
    model, moved(model), np.asarray(IDS), steps=5
  )
  assert report["guaranteed"]["all"] is None
  assert "no certificate" in report["guaranteed"]["says"][0]


def test_coupled_refuses_wrong_options():
  with pytest.raises(ValueError, match="d_model=15.*even"):
    build("s5", d_model=15)
  with pytest.raises(
    ValueError, match=r"norm.*'batch'.*layer, none, rms, scale"
  ):
    build("s5", block={"norm_type": "batch"})
  with pytest.raises(ValueError, match="coupled=True.*'isometric'"):
    build("isometric", mixer={})
  with pytest.raises(ValueError, match=r"num_heads.*8"):
    build("transformer", mixer={"num_heads": 16})
  for differing in (
    {"fidelity": 0.5, "fidelity_schedule": (1.0, 0.5)},
    {"fidelity": 0.5, "learn_fidelity": True},
    {"value_residual": 0.5, "learn_value_residual": True},
    {"differential": True},
  ):
    with pytest.raises(ValueError, match='memory="reversible".*recomputed'):
      build("neutreno", memory="reversible", mixer=differing)
    build("neutreno", mixer=differing)
  assert Coupled(None, 2).final_norm
  assert not Coupled(None, 2, norm_type="none").final_norm


BOUNDED = {
  "allpass": {"dilations": (1, 3)},
  "certified_s4d": {"state_size": 4},
}


@pytest.mark.parametrize("name", long_except(["allpass"], sorted(BOUNDED)))
@pytest.mark.slow
def test_a_bounded_mixer_gives_the_layer_an_interval(name):
  n, d = 5, 8
  with jax.enable_x64(True):
    model = build(
      name,
      mixer=BOUNDED[name],
      num_layers=1,
      d_model=d,
      block={"norm_type": "none", "mlp_dim": 6},
    )
    params = moved(model)["encoder"]
    layers = invertible.layers_of(model.stacks()["encoder"])
    (weights,) = layers.weights({"params": params})
    row = layers.certificate(weights, None, 1.0)
    low, high = row["sequences"]

    def flat(x):
      mask = jnp.ones((1, n), bool)
      return layers.forward(weights, x.reshape(1, n, d), None, mask)[0].ravel()

    x = draws.normal(0, (n * d,))
    values = np.linalg.svd(jax.jit(jax.jacrev(flat))(x), compute_uv=False)
    (found,) = lipschitz.guaranteed(model, {"encoder": params}, None, [1.0])
  assert_between(values, low, high)
  # The bounds are not idle.
  assert values[-1] < 0.8
  assert values[0] > 1.25
  chex.assert_trees_all_close(low * high, 1, rtol=1e-6)
  chex.assert_trees_all_close(row["mixer"], 1, rtol=0, atol=1e-3)
  chex.assert_trees_all_close(found["sequences"], (low, high), rtol=1e-6)


@pytest.mark.slow
def test_coupled_bound_holds_for_any_two_sequences():
  """The norm and the mean, under changes of one token and of all."""
  n, d = 6, 8
  model = build(
    "allpass",
    mixer=BOUNDED["allpass"],
    num_layers=1,
    d_model=d,
    block={"norm_type": "none", "mlp_dim": 6},
  )
  params = moved(model)["encoder"]
  layers = invertible.layers_of(model.stacks()["encoder"])
  (weights,) = layers.weights({"params": params})
  bound, forward = layers.bound(weights, None), jax.jit(layers.forward)
  assert layers.bound(weights, None, exact=False) is None
  mask = jnp.ones((1, n), bool)
  rng = np.random.default_rng(0)
  nearness = []
  for scale in (0.01, 1.0):
    for count in (1, n):
      x, step = rng.normal(size=(2, 1, n, d)).astype(np.float32)
      step[:, count:] = 0
      ends = [
        np.asarray(forward(weights, z, None, mask)[0])
        for z in (x, x + scale * step)
      ]

      def sizes(change):
        norms = np.linalg.norm(change[0], axis=-1)
        mean = np.linalg.norm(change[0].mean(0))
        norm = np.linalg.norm(norms)
        return invertible.Change(norm, norms.sum(), mean, norms.max())

      got, limit = sizes(ends[1] - ends[0]), bound(sizes(scale * step), n)
      for found, most in zip(got, limit, strict=True):
        assert_between(found, 0, most, rtol=1e-5)
      nearness.append(got.norm / limit.norm)
  assert max(nearness) > 0.2


def test_coupled_certificate_is_empty_with_norms_or_unbounded_mixers():
  """Or with mixers whose bound is not for Frobenius norms."""
  plain = {"norm_type": "none"}
  for name, block, mixer in (
    ("allpass", {}, BOUNDED["allpass"]),
    ("s4d", plain, {"state_size": 4}),
    ("injective_transformer", plain, {}),
  ):
    model = build(name, mixer=mixer, block=block)
    layers = invertible.layers_of(model.stacks()["encoder"])
    weights = layers.weights({"params": moved(model)["encoder"]})[0]
    assert layers.certificate(weights, None, 1.0) == {}
    assert layers.bound(weights, None) is None
