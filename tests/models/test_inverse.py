"""Back from the output to the tokens."""

import functools
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.commands import inverse as inverse_command
from jaxformers.foundations.errors import UserError
from jaxformers.models import inverse
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables
from jaxformers.training import loop
from tests import draws, initial
from tests.marks import long_except

README = Path(__file__).parents[2] / "README.md"


@functools.cache
def text():
  """Real text as bytes plus one, the second sample half padding."""
  ids = np.frombuffer(README.read_bytes()[:512], np.uint8).astype(np.int32) + 1
  ids = ids.reshape(2, 256).copy()
  ids[1, 150:] = 0
  return jnp.asarray(ids)


def build(num_layers, name="transject", d_model=32, alpha=2.0, **options):
  sizes = {"vocab_size": 257, "max_len": 256, "num_classes": 2} | options
  model = models.build(name, d_model=d_model, num_layers=num_layers, **sizes)
  ids = model.example()
  params = initial.params(model, ids)
  for i in range(num_layers):
    layer = params["encoder"][f"layer_{i}"]
    layer["residual"]["alpha"] = jnp.float32(alpha)
    layer["bias"] = draws.normal(i, layer["bias"].shape)
    layer["mixer"]["gate"] = 10 * layer["mixer"]["gate"]
  return model, params


@pytest.mark.parametrize("num_layers", long_except((2,), (2, 24)))
@pytest.mark.slow
def test_every_token_of_real_text_comes_back(num_layers):
  model, params = build(num_layers)
  hidden, side = inverse.forward(model, params, text())
  assert float(jnp.abs(hidden[-1] - hidden[0]).max()) > 1
  x = inverse.inverse(model, params, hidden[-1], side)
  error = jnp.abs(x - hidden[0]).max() / jnp.abs(hidden[0]).max()
  assert float(error) <= 2e-6
  recovered, positions = inverse.tokens(model, params, x)
  mask = np.asarray(text() > 0)
  np.testing.assert_array_equal(recovered[mask], np.asarray(text())[mask])
  np.testing.assert_array_equal(
    positions, np.broadcast_to(np.arange(256), (2, 256))
  )


@pytest.mark.parametrize(
  ("name", "block"),
  [
    ("random_transject", {}),
    ("isometric", {"form": "feed_forward"}),
    ("allpass", {}),
  ],
)
@pytest.mark.slow
def test_layers_with_maxmin_are_undone(name, block):
  """Its feed-forward is not injective, but the residual layer is."""
  sizes = {"vocab_size": 257, "max_len": 256, "num_classes": 2, "d_model": 16}
  outputs = []
  for activation in ("elu", "maxmin"):
    model = models.build(
      name, num_layers=2, block={**block, "activation": activation}, **sizes
    )
    params = initial.params(model, model.example())
    params = jax.tree.map(lambda a: a + 0.1 * draws.normal(1, a.shape), params)
    hidden, side = inverse.forward(model, params, text()[:, :64])
    x = inverse.inverse(model, params, hidden[-1], side)
    chex.assert_trees_all_close(x, hidden[0], atol=1e-5)
    outputs.append(hidden[-1])
  assert jnp.abs(outputs[0] - outputs[1]).max() > 1e-2


def test_maxmin_is_refused_where_there_is_no_feed_forward():
  sizes = {"vocab_size": 257, "max_len": 16, "num_classes": 2, "d_model": 16}
  block = {"activation": "maxmin"}
  with pytest.raises(UserError, match="feed_forward"):
    model = models.build("isometric", num_layers=1, block=block, **sizes)
    initial.params(model, model.example())


@pytest.mark.slow
def test_inverse_starts_from_any_layer():
  model, params = build(
    3, "random_transject", mixer={"num_experts": 2, "gating": "certified"}
  )
  hidden, side = inverse.forward(model, params, text())
  for layer in (1, 2, 3):
    x = inverse.inverse(model, params, hidden[layer], side, layer=layer)
    chex.assert_trees_all_close(x, hidden[0], atol=1e-5)
  with pytest.raises(ValueError, match="layer=4.*1.*3"):
    inverse.inverse(model, params, hidden[-1], side, layer=4)


def test_inverse_recovers_real_numbers_and_a_class_token():
  model, params = build(2, vocab_size=0, max_len=9, pool="cls")
  values = draws.normal(0, (2, 9))
  hidden, side = inverse.forward(model, params, values)
  x = inverse.inverse(model, params, hidden[-1], side)
  recovered, positions = inverse.tokens(model, params, x)
  np.testing.assert_allclose(recovered, values, atol=1e-5)
  np.testing.assert_array_equal(positions, [range(9)] * 2)


@pytest.mark.parametrize("name", ["isometric", "transject"])
def test_tokens_of_both_parts_of_a_sequence_come_back(name):
  sizes = {"vocab_size": 8, "max_len": 6, "num_classes": 2, "d_model": 16}
  embedded = {"separator": 3, "embedding": {"init_std": 1.0}}
  model = models.build(name, **sizes, **embedded, num_layers=2)
  ids = np.array([[1, 2, 3, 4, 5, 7], [4, 3, 6, 3, 5, 0]], np.int32)
  params = initial.params(model, ids)
  embedding = params["encoder"]["embedding"]
  shape = embedding["segments"].shape
  embedding["segments"] = 2 * jax.random.normal(jax.random.key(5), shape)
  states, side = inverse.forward(model, params, ids)
  back = inverse.inverse(model, params, states[-1], side)
  tokens, _ = inverse.tokens(model, params, back)
  np.testing.assert_array_equal(tokens[ids > 0], ids[ids > 0])


@pytest.mark.slow
def test_inverse_recovers_time_series():
  model, params = build(2, vocab_size=0, channels=3, max_len=9)
  values = draws.normal(0, (2, 9, 3))
  hidden, side = inverse.forward(model, params, values)
  x = inverse.inverse(model, params, hidden[-1], side)
  recovered, _ = inverse.tokens(model, params, x)
  np.testing.assert_allclose(recovered, values, atol=1e-4)


def test_layer_constants_are_measured_on_the_weights():
  model, params = build(2)
  encoder = make_variables(model, params)
  encoder = {kind: tree["encoder"] for kind, tree in encoder.items()}
  layers = inverse.layers_in_float32(model)
  layer = layers.weights(encoder)[0]
  a = np.tanh(2.0) / 2
  constants = layers.constants(layer, jnp.ones((1, 32)))
  assert list(constants) == ["mixture", "feed_forward"]
  np.testing.assert_allclose(list(constants.values()), [a, a], rtol=1e-5)
  stretched = layer._replace(
    experts=layer.experts._replace(v=layer.experts.v.at[1].multiply(3.0)),
    feed_forward=layer.feed_forward.at[0].multiply(0.5),
  )
  constants = layers.constants(stretched, -0.5 * jnp.ones((1, 32)))
  np.testing.assert_allclose(
    list(constants.values()), [1.5 * a, 0.5 * a], rtol=1e-5
  )


def test_layer_constants_divide_the_rate_of_the_certified_gate():
  model, params = build(
    1, "random_transject", alpha=20.0, mixer={"gating": "certified"}
  )
  encoder = {k: v["encoder"] for k, v in make_variables(model, params).items()}
  layers = inverse.layers_in_float32(model)
  layer = layers.weights(encoder)[0]
  w = params["encoder"]["layer_0"]["mixer"]["gate"]
  c = 1 + np.sqrt(4) * np.linalg.norm(w - w.mean(0)) / 2
  constants = layers.constants(layer, jnp.ones((1, 32)))
  np.testing.assert_allclose(list(constants.values()), [1 / c, 1], rtol=1e-5)


@pytest.mark.slow
def test_inverse_refuses_half_precision():
  model, params = build(2, dtype="bfloat16")
  with pytest.raises(ValueError, match="bfloat16.*in_float32"):
    inverse.forward(model, params, text())
  wide, same = models.in_float32(model), build(2)[0]

  def apply(model):
    return model.apply({"params": params}, text(), train=False)

  chex.assert_trees_all_equal(apply(wide), apply(same))


def test_a_large_token_does_not_end_the_work_on_others():
  model, params = build(2)
  hidden, side = inverse.forward(model, params, text())
  embedded = hidden[0].at[0, 3].multiply(1e4)
  moved, side = inverse.forward(model, params, text(), embedded)
  x = inverse.inverse(model, params, moved[-1], side)
  others = np.asarray(side.mask).copy()
  others[0, 3] = False
  np.testing.assert_allclose(
    np.asarray(x)[others], np.asarray(hidden[0])[others], atol=1e-5
  )


def test_a_layer_that_contracts_too_weakly_is_refused():
  model, params = build(1, alpha=20.0)
  hidden, side = inverse.forward(model, params, text())
  with pytest.raises(ValueError, match="layer 1.*max_steps"):
    inverse.inverse(model, params, hidden[-1], side)
  model, params = build(1, alpha=2.0)  # a = 0.96.
  hidden, side = inverse.forward(model, params, text())
  with pytest.raises(ValueError, match=r"0\.96.*max_steps=50"):
    inverse.inverse(model, params, hidden[-1], side, max_steps=50)
  x = inverse.inverse(model, params, hidden[-1], side)
  chex.assert_trees_all_close(x, hidden[0], atol=1e-4)
  doubled = side._replace(shared=2 * side.shared)
  with pytest.raises(ValueError, match=r"layer 1.*1\.92806"):
    inverse.inverse(model, params, hidden[-1], doubled)


def test_inverse_refuses_values_that_are_not_finite():
  model, params = build(2)
  hidden, side = inverse.forward(model, params, text())
  with pytest.raises(ValueError, match="[Ll]ayer 2.*finite"):
    inverse.inverse(model, params, jnp.nan * hidden[-1], side)
  y = hidden[-1].at[0, 3, 1].set(jnp.nan)
  with pytest.raises(ValueError, match="[Ll]ayer 2.*nan"):
    inverse.inverse(model, params, y, side)


def test_inverse_ignores_padding():
  """The inverse promises tokens alone."""
  model, params = build(2)
  hidden, side = inverse.forward(model, params, text())
  y = jnp.where(side.mask[..., None], hidden[-1], jnp.nan)
  x = inverse.inverse(model, params, y, side)
  np.testing.assert_allclose(
    np.asarray(x)[side.mask], np.asarray(hidden[0])[side.mask], atol=1e-5
  )


@pytest.mark.slow
def test_inverse_refuses_models_without_invertible_layers():
  model = models.build(
    "transformer",
    vocab_size=9,
    max_len=9,
    num_classes=2,
    d_model=8,
    num_layers=1,
    mixer={"num_heads": 2},
  )
  with pytest.raises(ValueError, match=r"PreNorm.*transject"):
    inverse.forward(model, {}, text())


@pytest.mark.slow
@pytest.mark.long
def test_inverse_command_measures_no_padding(
  smoke, tmp_path, capsys, monkeypatch
):
  loop.run(smoke(), tmp_path / "run")
  undo = inverse.inverse

  def undo_tokens(model, params, y, side):
    # Whatever stands at padding is not an error.
    return jnp.where(side.mask[..., None], undo(model, params, y, side), 1e3)

  monkeypatch.setattr(inverse, "inverse", undo_tokens)
  inverse_command.main([str(tmp_path / "run"), "--samples=4"])
  printed = capsys.readouterr().out
  assert float(re.search(r"embedding (\S+)\.", printed)[1]) < 1e-3


@pytest.mark.slow
def test_inverse_command_prints_recovered_shares(smoke, tmp_path, capsys):
  loop.run(smoke(), tmp_path / "run")
  capsys.readouterr()
  inverse_command.main([str(tmp_path / "run"), "--samples=4"])
  printed = capsys.readouterr().out
  assert "100.0000% of the tokens and 100.0000% of their positions" in printed
  assert "of 4 sequences, through 2 layers" in printed
  with pytest.raises(SystemExit, match="There is no run in"):
    inverse_command.main([str(tmp_path / "nothing")])


@pytest.mark.slow
def test_inverse_command_searches_tokens_of_causal_models(
  smoke, tmp_path, capsys
):
  causal = {"model.mixer.causal": True}
  loop.run(smoke("lru", **causal), tmp_path / "run")
  capsys.readouterr()
  options = ["--samples=2", "--length=6"]
  workdir = str(tmp_path / "run")
  inverse_command.main([workdir, *options, "--layer=1"])
  printed = capsys.readouterr().out
  assert "of 2 sequences, one after the other from layer 1" in printed
  assert "100.0000% recovered" in printed and "no noise radius" in printed
  # States of a file, as another program may have written them.
  run = inverse_command.states.load(workdir)
  ids = run.sample(1, 5)
  variables = make_variables(run.model, run.params)
  hidden = capture(run.model, variables, ids).hidden
  np.save(tmp_path / "states.npy", np.asarray(hidden[-1]))
  inverse_command.main([workdir, f"--states={tmp_path / 'states.npy'}"])
  assert run.inputs.decode(ids[0]) in capsys.readouterr().out
  # With padding, the mask belongs to the states; noise spoils tokens.
  padded = np.pad(np.asarray(hidden[-1]), ((0, 0), (0, 2), (0, 0)))
  mask = np.arange(7)[None] < 5
  np.savez(tmp_path / "states.npz", states=padded, mask=mask)
  from_archive = [workdir, f"--states={tmp_path / 'states.npz'}"]
  inverse_command.main(from_archive)
  assert run.inputs.decode(ids[0]) in capsys.readouterr().out
  inverse_command.main([*from_archive, "--noise=100"])
  assert run.inputs.decode(ids[0]) not in capsys.readouterr().out
  (tmp_path / "wrong.npy").write_text("no array")
  (tmp_path / "empty.npy").write_text("")
  np.save(tmp_path / "number.npy", 1.0)
  for name in ("wrong.npy", "empty.npy", "number.npy"):
    with pytest.raises(SystemExit, match=f"{name} has no states"):
      inverse_command.main([workdir, f"--states={tmp_path / name}"])
