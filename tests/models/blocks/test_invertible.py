"""Running layers backwards, and training without keeping activations."""

import dataclasses
import functools
from typing import Any

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models, orthogonal
from jaxformers.analysis.certificates import lipschitz
from jaxformers.models import cost, inverse
from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.two_branches import PreNorm
from jaxformers.models.capture import capture
from jaxformers.models.reductions import masked_mean
from jaxformers.models.transject.block import Injective, TransJect
from jaxformers.models.variables import of_stack
from jaxformers.models.variants import Variant
from tests import draws, initial
from tests.marks import long_except, slow_except

FORMS = [
  pytest.param("transject", "paper", marks=pytest.mark.long),
  pytest.param("transject", "certified", marks=pytest.mark.slow),
  pytest.param("random_transject", "paper", marks=pytest.mark.long),
  ("isometric", ""),
  pytest.param("allpass", "", marks=pytest.mark.long),
  pytest.param("certified_s4d", "", marks=pytest.mark.long),
]
IDS = draws.integers(0, (4, 12), 1, 30, end=7)


def build(name, activations, gating="paper", **options):
  options = {"d_model": 8, "num_layers": 3} | options
  mixer = {"num_experts": 2, "gating": gating}
  return models.build(
    name,
    vocab_size=30,
    max_len=512,
    num_classes=3,
    memory=activations,
    mixer=mixer if "transject" in name else {},
    **options,
  )


def moved(model, ids=IDS, alpha=1.0):
  """Parameters away from the start, where alpha is 0 and so is nearly all."""
  params = initial.params(model, ids, seed=1)
  flat = flax.traverse_util.flatten_dict(params)
  for path, leaf in flat.items():
    if path[-1] == "alpha":
      flat[path] = jnp.full_like(leaf, alpha)
    elif path[-1] == "bias":
      flat[path] = draws.normal(2, leaf.shape)
  return flax.traverse_util.unflatten_dict(flat)


def objective(params, model, ids=IDS):
  rotations = orthogonal.rotations(params, model.orthogonal_map)
  logits, sown = model.apply(
    {"params": params, "rotations": rotations},
    ids,
    train=True,
    mutable=["losses"],
  )
  return jnp.square(logits).sum() + sum(
    leaf.sum() for leaf in jax.tree.leaves(sown)
  )


@pytest.mark.parametrize(("name", "gating"), FORMS)
@pytest.mark.slow
def test_reversible_gradients_equal_stored_gradients(name, gating):
  params = moved(build(name, "stored", gating))
  grads = {}
  kinds = ["stored", "reversible"]
  kinds += ["recomputed"] * (gating == "certified")
  for kind in kinds:
    model = build(name, kind, gating)
    chex.assert_trees_all_equal_shapes(models.shapes(model), params)
    grad = jax.jit(
      jax.value_and_grad(functools.partial(objective, model=model))
    )
    grads[kind] = grad(params)
  for kind in kinds[1:]:
    for want, got in zip(
      jax.tree.leaves(grads["stored"]),
      jax.tree.leaves(grads[kind]),
      strict=True,
    ):
      scale = float(jnp.abs(want).max())
      assert scale > 0
      np.testing.assert_allclose(got, want, atol=1e-4 * scale)


@pytest.mark.parametrize(
  "activations", long_except(("reversible",), ("recomputed", "reversible"))
)
@pytest.mark.slow
def test_reversible_intermediates_equal_stored_intermediates(activations):
  ids = IDS[:2]
  params = moved(build("transject", "stored"))

  def apply(model):
    return model.apply(
      {"params": params}, ids, train=False, mutable=["intermediates"]
    )

  want, seen = apply(build("transject", "stored"))
  got, other = apply(build("transject", activations))
  chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
  seen, other = (s["intermediates"]["encoder"] for s in (seen, other))
  chex.assert_trees_all_close(
    other["hidden"], seen["hidden"], rtol=1e-5, atol=1e-5
  )
  if activations == "reversible":
    gates = [seen[f"layer_{i}"]["gate"][0] for i in range(3)]
    chex.assert_trees_all_close(other["gate"], tuple(gates), atol=1e-5)


def kept(name, activations, num_layers):
  """Bytes beside arguments and results of a compiled gradient."""
  model = build(name, activations, num_layers=num_layers)
  ids = jnp.ones((8, 512), jnp.int32)
  grad = jax.jit(jax.grad(functools.partial(objective, model=model, ids=ids)))
  memory = grad.lower(models.shapes(model)).compile().memory_analysis()
  return memory.temp_size_in_bytes


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
def test_reversible_memory_does_not_grow_with_depth():
  flat = [kept("random_transject", "reversible", n) for n in (2, 6)]
  assert flat[1] < 1.2 * flat[0]
  inputs = [kept("random_transject", "recomputed", n) for n in (2, 6)]
  assert flat[0] < inputs[1] < 4 * inputs[0]
  grown = [kept("random_transject", "stored", n) for n in (2, 6)]
  assert grown[1] > 1.8 * grown[0]
  assert inputs[1] < grown[1]


@pytest.mark.usefixtures("optimized")
@pytest.mark.slow
def test_recomputed_memory_is_below_stored_for_any_encoder():
  def held(activations):
    model = build("transformer", activations, num_layers=6)
    return cost.count_cost(model, 128).activations

  assert held("recomputed") < 0.3 * held("stored")


@pytest.mark.long
def test_reversible_bfloat16_gradients_are_near_float32():
  params = moved(build("transject", "stored"))
  grads = [
    jax.jit(
      jax.grad(
        functools.partial(
          objective, model=build("transject", kind, dtype="bfloat16")
        )
      )
    )(params)
    for kind in ("stored", "reversible")
  ]
  want, got = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in grads
  )
  assert np.isfinite(got).all()
  assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_reversible_gradients_of_deep_isometric_layers_are_near_exact():
  """With a = 0.87 an inverse multiplies rounding errors by seven."""
  block = {"form": "pointwise", "a": "wide"}
  options = {"num_layers": 12, "block": block}
  stored, looped = (
    build("isometric", kind, **options) for kind in ("stored", "reversible")
  )
  params = moved(stored, alpha=2.0)
  want, got = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)])
    for g in (
      jax.jit(jax.grad(functools.partial(objective, model=model)))(params)
      for model in (stored, looped)
    )
  )
  assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
  with pytest.raises(ValueError, match="bfloat16.*recomputed"):
    build("isometric", "reversible", dtype="bfloat16", **options)


def test_layers_of_rejects_other_layers():
  class Mine(TransJect):
    pass

  mine = functools.partial(Mine, num_experts=2)
  block = Injective(mine, 2)
  assert invertible.layers_of(block) is None
  assert invertible.layers_of(Injective(TransJect, 2)) is not None
  with pytest.raises(ValueError, match="Injective.*random_transject"):
    invertible.require_layers(block)


def test_require_layers_names_the_invertible_models():
  message = 'memory="reversible".*allpass.*isometric.*transject.*recomputed'
  with pytest.raises(ValueError, match=message):
    build("transformer", "reversible")
  with pytest.raises(ValueError, match="num_layers=1.*2 layers"):
    build("transject", "reversible", num_layers=1)
  with pytest.raises(ValueError, match="memory mode.*'kept'.*recomputed"):
    build("transject", "kept")
  with pytest.raises(ValueError, match=r"PreNorm.*transject"):
    invertible.require_layers(PreNorm(None, 2))


@dataclasses.dataclass(frozen=True)
class ScaleLayers(invertible.InvertibleLayers):
  """s x + m: scales channels by 1/2 to 3/2, adds the embedding's mean m."""

  num_layers: int
  dtype: Any = jnp.float32

  def weights(self, variables):
    layers = variables["params"]
    return [layers[f"layer_{i}"]["scale"] for i in range(self.num_layers)]

  def shared(self, variables, x, mask):
    del variables
    mean = masked_mean(x, mask)
    return invertible.Shared(mean, {"intermediates": {"mean": mean}})

  def forward(self, weights, x, shared, mask, side=None):
    del mask, side
    return (1 + jnp.tanh(weights) / 2) * x + shared[:, None], None

  def inverse(
    self, weights, y, shared, mask, side, *, constants=None, max_steps=1
  ):
    del mask, side, constants, max_steps
    return (y - shared[:, None]) / (1 + jnp.tanh(weights) / 2)

  def certificate(self, weights, shared, norm):
    del shared, norm
    scale = 1 + np.tanh(np.asarray(weights, np.float64)) / 2
    interval = float(scale.min()), float(scale.max())
    return {"tokens": interval, "sequences": interval}


class Scale(nn.Module):
  """A block without a mixer, for `ScaleLayers`."""

  concatenate_positions = False
  final_norm = False

  num_layers: int
  layer: int = 0

  @nn.compact
  def __call__(self, x, *, mask, carry, train):
    del train
    scale = self.param("scale", nn.initializers.normal(1.0), (x.shape[-1],))
    mean = masked_mean(x, mask) if carry is None else carry
    return self.invertible().forward(scale, x, mean, mask)[0], mean

  @nn.nowrap
  def invertible(self):
    return ScaleLayers(self.num_layers)


@pytest.fixture
def scale(monkeypatch):
  """A second family of invertible layers, under the name of a model."""
  monkeypatch.setitem(BLOCKS.data, "scale", Scale)
  monkeypatch.setitem(models.MODELS.data, "scale", Variant("", "scale"))

  def build(activations="stored"):
    return models.build(
      "scale",
      vocab_size=30,
      max_len=16,
      num_classes=3,
      d_model=8,
      num_layers=3,
      memory=activations,
    )

  return build


def test_user_invertible_block_trains_in_reverse(scale):
  params = initial.params(scale(), IDS)
  grads = {}
  for kind in ("stored", "recomputed", "reversible"):
    grad = jax.grad(functools.partial(objective, model=scale(kind)))
    grads[kind] = jax.jit(grad)(params)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["stored"]))
  for kind in ("recomputed", "reversible"):
    chex.assert_trees_all_close(
      grads[kind], grads["stored"], rtol=1e-4, atol=1e-5
    )


def test_user_invertible_block_is_undone(scale):
  params = initial.params(scale(), IDS)
  hidden, side = inverse.forward(scale(), params, IDS)
  x = inverse.inverse(scale(), params, hidden[-1], side)
  mask = np.asarray(side.mask)
  np.testing.assert_allclose(x[mask], hidden[0][mask], atol=1e-5)
  assert np.abs(hidden[-1] - hidden[0])[mask].max() > 0.1


@pytest.mark.slow
def test_user_invertible_block_has_its_certificate(scale):
  params = initial.params(scale(), IDS)
  report = lipschitz.measure_encoder(scale(), params, np.asarray(IDS), steps=20)
  low, high = report["guaranteed"]["all"]["tokens"]
  assert 0 < low < 1 < high
  least, greatest = report["adversarial"]["tokens"]
  assert low * (1 - 1e-4) <= least < greatest <= high * (1 + 1e-4)
  assert "Two tokens of one sample" in report["guaranteed"]["says"][0]
  assert "guaranteed, tokens" in lipschitz.factor_table(report)


INVERTIBLE = [
  name
  for name, variant in models.MODELS.items()
  if hasattr(BLOCKS[variant.block], "invertible")
]


@pytest.mark.parametrize(
  "name",
  slow_except(("isometric",), INVERTIBLE, ("isometric", "transject")),
)
@pytest.mark.slow
def test_invertible_forward_equals_the_modules(name):
  model = build(name, "stored")
  params = moved(model)
  variables = models.make_variables(model, params)
  captured = capture(model, variables, IDS)
  layers = invertible.require_layers(model.stacks()["encoder"])
  encoder = of_stack(variables, "encoder")
  shared = layers.shared(encoder, captured.hidden[0], captured.mask).value
  for weights, x, y in zip(
    layers.weights(encoder), captured.hidden, captured.hidden[1:], strict=False
  ):
    found, side = invertible.forward(layers, weights, x, shared, captured.mask)
    np.testing.assert_allclose(found, y, atol=1e-5)
    back = invertible.inverse(layers, weights, y, shared, captured.mask, side)
    mask = np.asarray(captured.mask)
    np.testing.assert_allclose(back[mask], x[mask], atol=1e-4)
