import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.evaluation import depth_use
from jaxformers.commands import depth_use as command
from jaxformers.commands import states
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables, outputs
from tests import draws, initial
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes

IDS = draws.integers(0, (2, 9), 1, 20, end=6)


def build(name="transformer", **options):
  model = models.build(
    name,
    vocab_size=20,
    max_len=9,
    d_model=16,
    **{"num_classes": 11, "num_layers": 3, **options},
  )
  return model, initial.params(model, IDS, seed=1)


def batch(model):
  if model.objective == "classification":
    return {
      "inputs": IDS,
      "targets": jnp.array([3, 7]),
      "weights": jnp.ones(2),
    }
  targets = jnp.roll(IDS, -1, 1).at[:, -1].set(0)
  return {"inputs": IDS, "targets": targets, "weights": 1.0 * (targets > 0)}


def measure(model, params):
  return depth_use.measure(model, make_variables(model, params), batch(model))


def test_measures_are_their_formulas():
  with jax.enable_x64(True):
    model, params = build(dtype="float32")
    found = measure(model, params)
    variables = make_variables(model, params)
    hidden = capture(model, variables, IDS).hidden
    mask = np.asarray(IDS) > 0
    for layer in range(3):
      h, after = (
        np.asarray(hidden[i], float)[mask] for i in (layer, layer + 1)
      )
      sizes = [np.linalg.norm(a, axis=-1) for a in (after - h, h)]
      np.testing.assert_allclose(
        found["contribution"][layer], (sizes[0] / sizes[1]).mean(), rtol=1e-5
      )
      cosine = ((after - h) * h).sum(-1) / sizes[0] / sizes[1]
      np.testing.assert_allclose(
        found["cosine"][layer], cosine.mean(), rtol=1e-4, atol=1e-6
      )
    # Replace one layer after the other by the identity.
    changes = np.diff(np.stack(hidden).astype(float), axis=0)[:, mask]
    logits = np.asarray(outputs(model, variables, IDS))
    for layer in range(3):
      skipped = jnp.arange(3) == layer
      other = depth_use.run(model, variables, batch(model), skipped).hidden
      moved = np.diff(np.stack(other).astype(float), axis=0)[:, mask]
      np.testing.assert_allclose(moved[layer], 0, atol=1e-6)
      size = np.linalg.norm(moved - changes, axis=-1)
      means = (size / np.linalg.norm(changes, axis=-1)).mean(1)
      want = means[layer + 1 :].max(initial=0)
      np.testing.assert_allclose(found["later"][layer], want, rtol=1e-4)
      # End after the layer, and compare the likeliest five of eleven classes.
      last = jnp.arange(3) > layer
      lens = depth_use.run(model, variables, batch(model), last).log_p
      best = [np.argsort(-np.asarray(x))[:, :5] for x in (logits, lens)]
      shared = [len({*a} & {*b}) / 5 for a, b in zip(*best, strict=True)]
      np.testing.assert_allclose(found["overlap"][layer], np.mean(shared))
    assert found["overlap"][0] < 1
    assert found["later"][0] > 0
  # The last layer has no later ones, and nothing follows it.
  assert found["later"][-1] == 0
  assert found["overlap"][-1] == 1
  np.testing.assert_allclose(found["divergence"][-1], 0, atol=1e-6)


def test_loss_and_lens_are_those_of_models_with_fewer_layers():
  """A model without its last layer is a model of fewer layers."""
  model, params = build()
  found = measure(model, params)
  shallow = model.clone(config=dataclasses.replace(model.config, num_layers=2))
  logits, fewer = (
    np.asarray(outputs(m, make_variables(m, params), IDS), float)
    for m in (model, shallow)
  )

  def log_p(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

  targets = batch(model)["targets"]
  losses = [-log_p(x)[np.arange(2), targets].mean() for x in (fewer, logits)]
  np.testing.assert_allclose(
    found["loss"][-1], losses[0] - losses[1], atol=1e-5
  )
  p, q = log_p(logits), log_p(fewer)
  want = (np.exp(p) * (p - q)).sum(-1).mean()
  np.testing.assert_allclose(found["divergence"][1], want, atol=1e-5)


def test_parts_of_a_batch_have_the_means_of_the_whole():
  model, params = build(objective="language_model", num_layers=2)
  arguments = (model, make_variables(model, params), batch(model))
  whole = depth_use.measure(*arguments)
  parts = depth_use.measure(*arguments, batch_size=1)
  for name, values in whole.items():
    np.testing.assert_allclose(parts[name], values, rtol=1e-4, atol=1e-6)


def test_a_decoder_of_segments_is_not_skipped():
  sizes = {"image": (8, 8, 3), "patch_size": 4, "vocab_size": 0}
  model = models.build(
    "transformer",
    max_len=4,
    d_model=16,
    num_layers=2,
    num_classes=3,
    objective="segmentation",
    **sizes,
  )
  images = draws.normal(0, (2, 8, 8, 3))
  params = initial.params(model, images, seed=1)
  make_zero(params["encoder"]["layer_1"])
  arrays = {
    "inputs": images,
    "targets": draws.integers(1, (2, 8, 8), 0, 3),
    "weights": jnp.ones(2),
  }
  variables = make_variables(model, params)
  found = depth_use.measure(model, variables, arrays)
  assert found["contribution"][1] == found["loss"][1] == 0
  assert found["contribution"][0] > 0


def make_zero(layer):
  for part in (layer["down"], layer["mixer"]["out"]):
    part.update(jax.tree.map(jnp.zeros_like, part))


@pytest.mark.parametrize("objective", ["classification", "language_model"])
def test_a_layer_with_zero_outputs_is_of_no_use(objective):
  model, params = build(objective=objective)
  make_zero(params["encoder"]["layer_1"])
  found = measure(model, params)
  for name in ("contribution", "cosine", "later", "loss"):
    assert found[name][1] == 0
    assert name == "cosine" or found[name][0] > 0 or name == "loss"
  assert found["divergence"][0] == found["divergence"][1]


def test_transject_adds_a_share_of_its_layers():
  """Layers of 1 / L residuals: a control without drift over the depth."""
  model, params = build("transject", mixer={"num_experts": 2})
  # Layers start as the identity.
  params = jax.tree.map(lambda p: p + 0.3, params)
  found = measure(model, params)["contribution"]
  assert (found > 0).all()
  assert found.max() < 4 * found.min()


@pytest.mark.parametrize(
  "name",
  slow_except(
    ("transformer", "isometric"),
    sorted(models.MODELS),
    ("deltanet", "linformer", "mega", "transject"),
  ),
)
def test_every_encoder_is_measured(name):
  mixer = small_sizes(models.MODELS[name].mixer)
  model, params = build(name, mixer=mixer, num_layers=2)
  for values in measure(model, params).values():
    assert values.shape == (2,)
    assert np.isfinite(values).all()


def test_depth_use_command_prints_a_table_of_layers(
  monkeypatch, tmp_path, capsys
):
  model, params = build()
  run = types.SimpleNamespace(
    model=model,
    params=params,
    draw=lambda count, *_: {
      name: np.asarray(array)[:count] for name, array in batch(model).items()
    },
  )
  monkeypatch.setattr(states, "load", lambda workdir, **_: run)
  out = tmp_path / "use"
  command.main(["one", "--samples=2", f"--out={out}"])
  printed = capsys.readouterr().out
  assert printed.splitlines()[2].split() == ["layer", "1", "2", "3"]
  assert all(title in printed for title in depth_use.MEASURES.values())
  assert "2 test samples of at most 9 tokens, 1 seed." in printed
  assert len(out.with_suffix(".csv").read_text().splitlines()) == 1 + 6 * 3
  assert out.with_suffix(".png").stat().st_size > 5_000
