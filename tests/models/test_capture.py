import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models.capture import capture, parts
from jaxformers.models.transject.layer import (
  orthogonal_feed_forward,
  residual_weight,
)
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.marks import long_except

IDS = draws.integers(0, (2, 9), 1, 20, end=6)


def build(name, **options):
  return models.build(
    name,
    vocab_size=20,
    max_len=9,
    num_classes=3,
    d_model=8,
    num_layers=2,
    **options,
  )


def init(model, ids=IDS):
  params = initial.params(model, ids, seed=1)
  for i in range(2):
    if "residual" in params["encoder"][f"layer_{i}"]:
      params["encoder"][f"layer_{i}"]["residual"]["alpha"] = jnp.float32(1.0)
  return params


@pytest.mark.parametrize("activations", ["stored", "reversible"])
def test_capture_has_gates_and_sigma_of_every_transject_layer(activations):
  model = build("transject", memory=activations)
  captured = capture(model, make_variables(model, init(model)), IDS)
  chex.assert_shape(captured.hidden, (2, 9, 8))
  assert len(captured.hidden) == 3
  chex.assert_trees_all_equal(captured.mask, IDS > 0)
  chex.assert_shape(captured.gates, (2, 2, 4))
  np.testing.assert_allclose(captured.gates.sum(-1), 1, atol=1e-6)
  chex.assert_shape(captured.sigma, (2, 8))
  np.testing.assert_allclose(captured.sigma.max(-1), 1, atol=1e-6)


def test_capture_of_other_models_has_no_gates():
  model = build("transformer", mixer={"num_heads": 2}, pool="cls")
  captured = capture(model, make_variables(model, init(model)), IDS)
  assert captured.gates is None
  assert captured.sigma is None
  chex.assert_shape(captured.hidden, (2, 10, 8))
  assert captured.mask[:, 0].all()


@pytest.mark.parametrize(
  "name",
  long_except(("transject",), ("transject", "random_transject", "local")),
)
@pytest.mark.slow
def test_capture_accepts_an_embedding_in_place_of_tokens(name):
  model = build(name)
  variables = make_variables(model, init(model))
  captured = capture(model, variables, IDS)
  same = capture(model, variables, IDS.at[:, :3].set(1), captured.hidden[0])
  chex.assert_trees_all_close(same.hidden, captured.hidden, atol=1e-5)
  slope = jax.grad(
    lambda x: capture(model, variables, IDS, x).hidden[-1].sum()
  )(captured.hidden[0])
  assert np.any(slope[0])


def test_capture_treats_sequences_of_a_pair_as_samples():
  model = build("transject", num_inputs=2, interaction="nli", pool="max")
  ids = jnp.stack([IDS, IDS[:, ::-1]], 1)
  captured = capture(model, make_variables(model, init(model, ids)), ids)
  chex.assert_shape(captured.hidden, (4, 9, 8))
  chex.assert_trees_all_equal(captured.mask, ids.reshape(4, 9) > 0)


@pytest.mark.parametrize("activations", ["stored", "reversible"])
def test_parts_of_experts_mix_to_the_layer_output(activations):
  """x + a sum_e lambda_e F_e(x) from the experts, then the feed-forward."""
  model = build("transject", memory=activations)
  params = init(model)
  variables = make_variables(model, params)
  captured = capture(model, variables, IDS)
  experts = parts(model, variables, captured)
  assert [expert.shape for expert in experts] == [(2, 4, 9, 8)] * 2
  layer = model.stacks()["encoder"]
  layer_params = {"params": params["encoder"]["layer_0"]}
  kw = {"mask": captured.mask, "carry": captured.sigma, "train": False}
  output, _ = layer.apply(layer_params, captured.hidden[0], **kw)
  np.testing.assert_allclose(output, captured.hidden[1], atol=1e-5)
  mixed = jnp.einsum("be,bend->bnd", captured.gates[0], experts[0])
  bias = jax.tree.map(jnp.zeros_like, layer_params["params"]["bias"])
  zero = {"params": layer_params["params"] | {"bias": bias}}
  # The feed-forward of what the experts mix to is the layer's output.
  branch = layer.apply(zero, captured.hidden[0], **kw)[0]
  w = variables["rotations"]["encoder"]["layer_0"]
  turned = orthogonal_feed_forward(mixed, w["feed_forward_skew"], bias)
  a = residual_weight(layer_params["params"]["residual"]["alpha"]) / 2
  np.testing.assert_allclose(mixed + a * turned, branch, atol=1e-5)


def test_parts_of_heads_are_taken_before_the_output_projection():
  model = build("transformer", mixer={"num_heads": 2})
  params = init(model)
  variables = make_variables(model, params)
  captured = capture(model, variables, IDS)
  attended = parts(model, variables, captured)
  assert [head.shape for head in attended] == [(2, 2, 9, 4)] * 2
  heads = captured.heads[0]
  scores = jnp.einsum("bhne,bhme->bhnm", heads["query"], heads["key"]) / 2
  scores = jnp.where((IDS > 0)[:, None, None], scores, -jnp.inf)
  want = jax.nn.softmax(scores) @ heads["value"]
  np.testing.assert_allclose(attended[0][0], want[0], atol=1e-5)
