"""States of causal models in the user's hands: carried, streamed, trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformers as jf
from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models.streams import Stream
from jaxformers.models.variables import make_variables
from tests.marks import slow_except
from tests.models.test_cache import build, start

N = 13
IDS = np.random.default_rng(2).integers(1, 11, (2, N))
POOLS = ("mean", "max", "root_mean", "padded_mean", "first")


def classifier(pool, name="lru", **options):
  return models.build(
    name,
    vocab_size=11,
    max_len=N,
    num_classes=3,
    d_model=8,
    num_layers=1,
    positions="none",
    pool=pool,
    mixer={"causal": True} | options,
  )


def read(stream, cuts):
  outputs = [stream.feed(part) for part in np.split(IDS, cuts, 1)]
  return outputs[-1] if outputs[0].ndim == 2 else np.concatenate(outputs, 1)


@pytest.mark.parametrize("cuts", [(), (1, 2, 7), (8,)])
def test_streams_of_any_parts_equal_the_whole(cuts):
  model = build("rglru", positions="none")
  variables = make_variables(model, start(model))
  whole = jax.jit(functools.partial(model.apply, train=False))(variables, IDS)
  stream = Stream(model, variables)
  for _ in range(2):
    np.testing.assert_allclose(read(stream, cuts), whole, atol=2e-5)
    assert stream.num_tokens == N
    stream.reset()


@pytest.mark.parametrize("pool", slow_except(("mean",), POOLS))
def test_a_classifier_pools_all_tokens_so_far(pool):
  model = classifier(pool)
  params = start(model)
  # Padding at the start of a part is no token.
  ids = IDS.copy()
  ids[1, 5:9] = 0
  apply = jax.jit(model.apply, static_argnames=("train", "return_state"))
  whole = apply({"params": params}, ids, train=False)
  state = None
  for part in np.split(ids, (5, 9), 1):
    y, state = apply(
      {"params": params},
      part,
      train=False,
      initial_state=state,
      return_state=True,
    )
  np.testing.assert_allclose(y, whole, atol=2e-5)


def test_gradients_of_carried_states_equal_those_of_the_whole():
  model = build("lru", positions="none")
  params = start(model)
  weights = jnp.asarray(np.random.default_rng(3).normal(size=(2, N, 11)))

  def finite(log_p):
    return jnp.where(jnp.isfinite(log_p), log_p, 0)

  def in_parts(params):
    total, state = 0.0, None
    for part, weight in zip(
      np.split(IDS, (5,), 1), np.split(weights, (5,), 1), strict=True
    ):
      log_p, state = model.apply(
        {"params": params},
        part,
        train=True,
        initial_state=state,
        return_state=True,
      )
      total += (finite(log_p) * weight).sum()
    return total

  def whole(params):
    log_p = model.apply({"params": params}, IDS, train=True)
    return (finite(log_p) * weights).sum()

  got, want = (jax.jit(jax.grad(f))(params) for f in (in_parts, whole))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=2e-4),
    got,
    want,
  )


def test_other_collections_come_beside_the_state():
  model = classifier("mean")
  variables = {"params": start(model)}
  result, state = model.apply(
    variables,
    IDS,
    train=False,
    return_state=True,
    mutable="intermediates",
  )
  logits, sown = result
  assert logits.shape == (2, 3)
  assert set(sown) == {"intermediates"}
  assert set(state) == {"encoder", "head"}
  # A state alone changes nothing of what Flax returns.
  more = model.apply(variables, IDS, train=False, initial_state=state)
  assert more.shape == (2, 3)
  assert not np.allclose(more, logits)


def test_a_state_holds_nothing_of_the_parameters():
  model = classifier("mean", name="certified_s4d", state_size=4)
  params = start(model)
  _, state = model.apply(
    {"params": params}, IDS, train=False, return_state=True
  )
  # The gain of the kernels, which generation keeps, has no axis of sequences.
  assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {2}


def test_models_without_states_are_refused():
  model = classifier("mean", name="s5", causal=False)
  with pytest.raises(UserError, match="reads later tokens"):
    Stream(model, {})
  with pytest.raises(UserError, match="reads later tokens"):
    model.apply({}, IDS, train=False, return_state=True)
  model = classifier("all_mean")
  with pytest.raises(UserError, match="pool of a model with a state"):
    model.apply({"params": start(model)}, IDS, train=False, return_state=True)


def test_streams_refuse_inputs_that_cannot_follow():
  model = build("lru", positions="sinusoid")
  stream = Stream(model, {"params": start(model)})
  stream.feed(IDS[:, :3])
  with pytest.raises(UserError, match="3 sequences after 2"):
    stream.feed(np.ones((3, 1), int))
  with pytest.raises(UserError, match="shape"):
    stream.feed(np.ones(3))
  with pytest.raises(UserError, match="14 tokens are more than max_len=13"):
    stream.feed(np.ones((2, 11), int))
  with pytest.raises(UserError, match="type float64: give integer ids"):
    stream.feed(np.ones((2, 1)))


def test_a_trained_model_streams():
  model = jf.load("zoo:language-allpass")
  ids = np.array([[5, 7, 3, 9, 2]])
  stream = model.stream()
  parts = [stream.feed(ids[:, :2]), stream.feed(ids[:, 2:])]
  np.testing.assert_allclose(
    np.concatenate(parts, 1), model.outputs(ids), atol=1e-4
  )


def test_streams_of_forecasts_return_every_token():
  options = {"d_model": 4, "num_layers": 1, "max_len": 8, "positions": "none"}
  model = models.build("lru", vocab_size=0, objective="next_values", **options)
  x = np.float32([[0.1, 0.2, 0.3]])
  params = start(model)
  want = model.apply({"params": params}, x, train=False)
  got = Stream(model, make_variables(model, params)).feed(x)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_positions_of_an_odd_width_continue_after_a_state():
  options = {"num_layers": 1, "max_len": N, "objective": "language_model"}
  model = models.build(
    "s5", vocab_size=11, d_model=15, positions="sinusoid", **options
  )
  variables = make_variables(model, start(model))
  want = model.apply(variables, IDS, train=False)
  got = read(Stream(model, variables), (5,))
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
