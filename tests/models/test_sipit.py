"""Tokens from states, one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from scipy.spatial import distance

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import sipit
from jaxformers.models.capture import capture
from jaxformers.models.model import EncoderModel
from jaxformers.models.variables import make_variables
from tests.marks import long_except, slow_except
from tests.models.test_cache import classifier, start

V, N = 23, 7
NAMES = (
  "transformer",
  "neutreno",
  "mamba",
  "lru",
  "allpass",
  "retnet",
  "deltanet",
  "certified_s4d",
)


@functools.cache
def build(name, **fields):
  model = models.build(
    name,
    vocab_size=V,
    max_len=12,
    d_model=16,
    num_layers=2,
    num_classes=0,
    objective="language_model",
    **fields,
  )
  return model, start(model)


def prompts(count=3, n=N):
  return np.random.default_rng(5).integers(1, V, (count, n))


def states(model, params, ids, layer):
  variables = make_variables(model, params)
  return np.asarray(capture(model, variables, jnp.asarray(ids)).hidden[layer])


@pytest.mark.parametrize("policy", slow_except(("all",), sipit.POLICIES))
@pytest.mark.parametrize("name", slow_except(("allpass",), NAMES, ("lru",)))
def test_all_tokens_come_back_from_every_layer(name, policy):
  model, params = build(name)
  ids = prompts()
  for layer in (0, 1, 2):
    given = states(model, params, ids, layer)
    found = sipit.recover(
      model,
      params,
      given,
      layer=layer,
      policy=policy,
      num_candidates=4,
      batch_size=2,
    )
    np.testing.assert_array_equal(found.ids, ids)
    assert found.margins.min() > 100
    assert found.distances.max() < 1e-5 * np.abs(given).max()


@pytest.mark.parametrize("name", slow_except(("lru",), NAMES))
def test_cached_candidates_equal_the_whole(name):
  model, params = build(name)
  variables = make_variables(model, params)
  encoder = EncoderModel(model.config)
  # One prompt with three last tokens.
  ids = np.repeat(prompts(1), 3, 0)
  ids[:, -1] = 1, 8, V - 1
  read = jax.jit(functools.partial(sipit.read_token, encoder))
  cache = jax.jit(lambda v: sipit.start_cache(encoder, v, 3))(variables)
  for token in ids.T:
    got, cache = read(variables, cache, jnp.asarray(token))
  hidden = capture(model, variables, jnp.asarray(ids)).hidden
  for layer in (1, 2):
    want = np.asarray(hidden[layer])[:, -1]
    bounds = 2e-6 * np.maximum(np.abs(want).max(-1), 1)
    assert (np.abs(got[layer] - want).max(-1) <= bounds).all()


def test_tables_of_positions_are_cut_with_the_caches():
  model, params = build("transformer", positions="learned")
  table = params["encoder"]["embedding"]["positions"]
  assert table.shape == (12, 16) and np.ptp(table, 0).min() > 0
  ids = prompts()
  found = sipit.recover(model, params, states(model, params, ids, 2))
  np.testing.assert_array_equal(found.ids, ids)
  assert found.margins.min() > 100


def test_prompts_of_unequal_lengths():
  model, params = build("lru")
  ids = prompts()
  ids[1, 4:] = 0
  mask = ids > 0
  given = states(model, params, ids, 2).copy()
  given[1, 4:] = np.nan  # States at padding are not read.
  found = sipit.recover(model, params, given, mask=mask)
  np.testing.assert_array_equal(found.ids, ids)
  # Padding after all tokens does not change the result.
  longer = np.pad(given, ((0, 0), (0, 3), (0, 0)))
  padded = sipit.recover(
    model, params, longer, mask=np.pad(mask, ((0, 0), (0, 3)))
  )
  np.testing.assert_array_equal(padded.ids[:, :-3], ids)
  assert not padded.ids[:, -3:].any()
  assert np.isnan(padded.margins[:, -3:]).all()


def test_prompts_of_a_classifier_have_no_holes():
  sizes = {"vocab_size": V, "max_len": 12, "d_model": 16, "num_layers": 1}
  model = models.build("lru", num_classes=2, mixer={"causal": True}, **sizes)
  with pytest.raises(UserError, match="padding .id 0. before a token"):
    sipit.find_states(model, start(model), np.array([[3, 0, 5, 7]]))


def test_equal_embeddings_are_reported_as_a_collision():
  model, params = build("transformer", positions="sinusoid")
  table = params["encoder"]["embedding"]["tokens"]["embedding"]
  tokens = {"embedding": table.at[4].set(table[9])}
  embedding = params["encoder"]["embedding"] | {"tokens": tokens}
  params = params | {"encoder": params["encoder"] | {"embedding": embedding}}
  ids = np.array([[7, 9, 5]])
  found = sipit.recover(model, params, states(model, params, ids, 2))
  assert found.margins[0, 1] == 1 and found.ids[0, 1] in (4, 9)
  assert found.margins[0, [0, 2]].min() > 100


def test_rotary_positions_alone_do_not_tell_a_from_aa():
  model, params = rotary()
  hidden = states(model, params, np.full((1, 6), 3), 2)
  np.testing.assert_allclose(hidden[0, 1:], hidden[0, :-1], atol=2e-6)
  # With all states the tokens still come back.
  found = sipit.recover(model, params, hidden)
  np.testing.assert_array_equal(found.ids, 3)


def rotary():
  mixer = FrozenDict(rotary=True)
  return build("transformer", positions="none", mixer=mixer)


@pytest.mark.parametrize(
  "name",
  long_except(
    ["allpass", "l2_transformer"],
    ["allpass", "certified_s4d", "injective_transformer", "l2_transformer"],
  ),
)
def test_noise_below_the_radius_changes_no_token(name):
  model, params = build(name)
  ids = prompts(8)
  rng = np.random.default_rng(1)
  for layer in (1, 2):
    given = states(model, params, ids, layer)
    radius = sipit.noise_radius(model, params, layer)
    assert radius > 1e-4
    noise = rng.normal(size=given.shape)
    noise *= 0.99 * radius / np.linalg.norm(noise, axis=-1, keepdims=True)
    found = sipit.recover(model, params, given + noise, layer=layer)
    np.testing.assert_array_equal(found.ids, ids)
    # Towards the state of the nearest wrong candidate, noise of a bit more than
    # half of the distance is too much: it is above the radius.
    wrong = ids.copy()
    apart = []
    for v in range(1, V):
      wrong[:, -1] = v
      apart.append(states(model, params, wrong, layer)[:, -1] - given[:, -1])
    sizes = np.linalg.norm(apart, axis=-1)
    sizes[sizes < 1e-4] = np.inf
    assert sizes.min() / 2 >= radius
    spoiled = given.copy()
    nearest = np.take_along_axis(
      np.array(apart), sizes.argmin(0)[None, :, None], 0
    )[0]
    spoiled[:, -1] += 0.51 * nearest
    found = sipit.recover(model, params, spoiled, layer=layer)
    assert (found.ids[:, -1] != ids[:, -1]).all()


def test_no_radius_is_claimed_for_other_models():
  for name in ("transformer", "lru"):
    assert sipit.noise_radius(*build(name)) is None


def test_half_precision_is_searched_in_float32():
  model, params = build("lru", dtype="bfloat16")
  ids = prompts()
  single = models.in_float32(model)
  found = sipit.recover(model, params, states(single, params, ids, 2))
  np.testing.assert_array_equal(found.ids, ids)


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"layer": 3}, "layer=3: choose one of 0 to 2"),
    ({"layer": 1.0}, "layer=1.0: choose one of 0 to 2"),
    ({"layer": True}, "layer=True: choose one of 0 to 2"),
    ({"states": np.full((1, 4, 16), "a")}, "type <U1"),
    ({"states": np.zeros((1, 4, 16), np.complex64)}, "type complex64"),
    ({"policy": "random"}, "'random'.*all, gradient"),
    ({"policy": "gradient", "num_candidates": 0}, "num_candidates=0"),
    ({"states": np.full((1, 4, 16), 1e30)}, "too far from the states"),
    ({"states": np.zeros((1, 4, 5))}, r"\[1, 4, 5\].*\[b, n, 16\]"),
    ({"states": np.full((1, 4, 16), np.nan)}, "not finite"),
    ({"states": np.zeros((1, 13, 16))}, "13 tokens.*max_len=12"),
    (
      {"mask": np.array([[True, False, True, True]])},
      "mask is False before a token",
    ),
  ],
)
def test_wrong_arguments_are_refused(options, text):
  model, params = build("transformer")
  options = {"states": np.zeros((1, 4, 16))} | options
  with pytest.raises(UserError, match=text):
    sipit.recover(model, params, options.pop("states"), **options)


def test_models_that_read_later_tokens_are_refused():
  model = models.build(
    "transformer",
    vocab_size=V,
    max_len=12,
    num_classes=2,
    d_model=16,
    num_layers=1,
  )
  with pytest.raises(UserError, match="reads later tokens"):
    sipit.recover(model, start(model), np.zeros((1, 4, 16)))
  assert sipit.noise_radius(model, start(model)) is None


@pytest.mark.parametrize("fields", [{"separator": 9}, {"pool": "cls"}])
def test_models_that_begin_every_part_anew_are_refused(fields):
  model = classifier(objective="token_classification", **fields)
  with pytest.raises(UserError, match="class tokens or with a separator"):
    sipit.check_model(model)


def test_reversible_layers_have_a_cache():
  model, params = build("allpass", memory="reversible")
  ids = prompts()
  stored, _ = build("allpass")
  found = sipit.recover(model, params, states(stored, params, ids, 2))
  np.testing.assert_array_equal(found.ids, ids)


def test_nearest_pairs_equal_all_distances(monkeypatch):
  monkeypatch.setattr(sipit, "MAX_ENTRIES", 7 * 40)
  x = np.random.default_rng(0).normal(size=(40, 5))
  x[33] = x[4] + 1e-9  # Cancellation would hide this distance.
  x[34] = x[7]
  pairs = sipit.nearest(x, 6, 1e-6)
  distances = distance.pdist(x)
  np.testing.assert_allclose(pairs.distances, np.sort(distances)[:6], rtol=1e-6)
  assert pairs.pairs[:2].tolist() == [[7, 34], [4, 33]]
  assert pairs.num_below == 2
  square = distance.squareform(distances)
  np.testing.assert_allclose(square[tuple(pairs.pairs.T)], pairs.distances)
  assert len(sipit.nearest(x[:2], 6).distances) == 1
  # Large vectors hide no distance.
  places = [0, 3e-5, 1e-3, 1e-3 + 1e-5, 5, 10]
  large = np.array([[1e4 * (1 + k // 4), y] for k, y in enumerate(places)])
  (least,) = sipit.nearest(large, 1).distances
  assert least == pytest.approx(1e-5, rel=1e-3)
