"""Step by step and whole sequences give the same, for every mixer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models import cache, mixer
from tests import initial
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes
from tests.models.test_reconstruction import names

N = 13
# Models whose mixer goes on from a cache, and options that change how.
STEPPING = [
  *(
    (name, {})
    for name, variant in sorted(models.MODELS.items())
    if variant.mixer in mixer.names_with_step()
  ),
  ("mega", {"attention_chunk": 5, "bias": "rotary", "weights": "laplace"}),
  ("transformer", {"rotary": True}),
]


SOME = ("linear_transformer", "mega", "s5", "transformer")
SHORT = [case for case in STEPPING if case[0] in SOME]
QUICK = [("s5", {}), ("transformer", {"rotary": True})]


@functools.cache
def build(name, options=(), **fields):
  variant = models.MODELS[name]
  return models.build(
    name,
    vocab_size=11,
    max_len=N,
    num_classes=0,
    d_model=8,
    num_layers=2,
    objective="language_model",
    mixer=small_sizes(variant.mixer) | dict(options),
    **fields,
  )


def classifier(**fields):
  sizes = {"vocab_size": 11, "max_len": N, "d_model": 8, "num_layers": 1}
  causal = {"causal": True}
  return models.build("s5", **sizes, num_classes=3, mixer=causal, **fields)


def start(model):
  """Parameters that nothing hides behind: none of them is 0."""
  params = initial.params(model, model.example())
  rng = np.random.default_rng(0)
  moved = jax.tree.map(
    lambda p: p + (0.2 * rng.normal(size=p.shape)).astype(p.dtype),
    jax.device_get(params),
  )
  return jax.device_put(moved)


def ids():
  """Two sequences; the second has holes, and padding at its end."""
  drawn = np.random.default_rng(1).integers(1, 11, (2, N))
  drawn[1, [1, 4, 10, 11, 12]] = 0
  return jnp.asarray(drawn, jnp.int32)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    pytest.param(*case.values[0], marks=case.marks)
    for case in slow_except(QUICK, STEPPING, SHORT)
  ],
)
def test_cached_steps_equal_whole_sequences(name, options):
  model = build(name, tuple(options.items()), positions="none")
  params, tokens = start(model), ids()
  whole = jax.jit(functools.partial(model.apply, train=False))(
    {"params": params}, tokens
  )

  @jax.jit
  def go_on(carried, part):
    return model.apply(
      {"params": params, **carried}, part, train=False, mutable=[cache.CACHE]
    )

  at = np.asarray(tokens > 0)[..., None] & np.isfinite(whole)
  assert at.sum() > 20 * 9
  # Five tokens at once, and then one at a time; or parts, of which the second
  # begins with a hole after one token.
  singly = [(0, 5), *((i, i + 1) for i in range(5, N))]
  for parts in (singly, [(0, 1), (1, 6), (6, N)]):
    outputs, carried = [], {}
    for first, last in parts:
      y, carried = go_on(carried, tokens[:, first:last])
      outputs.append(y)
    steps = np.concatenate(outputs, 1)
    np.testing.assert_allclose(steps[at], np.asarray(whole)[at], atol=2e-5)


@pytest.mark.parametrize(
  "name", slow_except(("s5",), ["lru", "mamba", "rglru", "s4d", "s5"])
)
@pytest.mark.slow
def test_recurrent_cache_does_not_grow(name):
  model = build(name, positions="none")
  params = start(model)

  def remembered(tokens):
    _, carried = jax.eval_shape(
      functools.partial(model.apply, train=False, mutable=[cache.CACHE]),
      {"params": params},
      tokens,
    )
    return sum(leaf.size for leaf in jax.tree.leaves(carried))

  assert 0 < remembered(ids()[:, :1]) == remembered(ids())


@pytest.mark.parametrize(
  "name", slow_except(["local"], names("next"), ["local", "mega"])
)
def test_cached_steps_skip_padding_for_every_causal_mixer(name):
  """Padding on the left and holes give the same as the tokens themselves."""
  check_padding(build(name, positions="none"))


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_cached_positions_count_tokens_only(positions):
  options = (("rotary", positions == "sinusoid"),)
  check_padding(build("transformer", options, positions=positions))


def check_padding(model):
  params = start(model)
  text = np.random.default_rng(2).integers(1, 11, 9)
  padded = np.zeros((4, N), np.int32)
  places = [
    np.arange(9),
    np.arange(9) + 4,
    np.array([0, 1, 4, 5, 6, 8, 9, 10, 11]),
    np.array([1, 2, 3, 5, 6, 7, 9, 11, 12]),
  ]
  for row, at in zip(padded, places, strict=True):
    row[at] = text
  apply = jax.jit(functools.partial(model.apply, train=False))
  log_p = np.asarray(apply({"params": params}, padded))
  alone = log_p[0, :9, 1:]
  for row, at in zip(log_p, places, strict=True):
    np.testing.assert_allclose(row[at, 1:], alone, atol=2e-5)


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
@pytest.mark.slow
def test_cached_positions_continue_after_the_prompt(positions):
  model = build("transformer", positions=positions)
  params, tokens = start(model), ids()
  whole = jax.jit(functools.partial(model.apply, train=False))(
    {"params": params}, tokens
  )
  apply = jax.jit(
    functools.partial(model.apply, train=False, mutable=[cache.CACHE])
  )
  first, carried = apply({"params": params}, tokens[:, :6])
  rest, _ = apply({"params": params, **carried}, tokens[:, 6:])
  steps = np.concatenate([first, rest], 1)
  at = np.asarray(tokens > 0)
  np.testing.assert_allclose(steps[at, 1:], whole[at, 1:], atol=1e-5)


def test_sinusoids_continue_after_the_greatest_length():
  model = build("s5", positions="sinusoid")
  variables = {"params": start(model)}
  tokens = jnp.asarray(np.random.default_rng(2).integers(1, 11, (1, 3 * N)))
  whole = model.apply(variables, tokens, train=False)
  parts, state = [], None
  for part in jnp.split(tokens, [5, N + 2], 1):
    log_p, state = model.apply(
      variables, part, train=False, return_state=True, initial_state=state
    )
    parts.append(log_p)
  np.testing.assert_allclose(
    np.concatenate(parts, 1)[..., 1:], whole[..., 1:], atol=1e-5
  )


def test_learned_positions_after_the_last_one_are_nan():
  """They are not the last one again; padding has any position."""
  model = build("s5", positions="learned")
  variables = {"params": start(model)}
  tokens = jnp.ones((1, N), jnp.int32)
  options = {"train": False, "return_state": True}
  log_p, state = model.apply(variables, tokens, **options)
  assert jnp.isfinite(log_p[..., 1:]).all()
  options["initial_state"] = state
  padding, _ = model.apply(variables, jnp.array([[0, 0]]), **options)
  assert jnp.isfinite(padding[..., 1:]).all()
  log_p, _ = model.apply(variables, tokens[:, :2], **options)
  assert jnp.isnan(log_p[..., 1:]).all()


def test_attention_with_a_state_has_dropout_in_training():
  model = build("transformer", (("dropout_rate", 0.5), ("num_heads", 1)))
  variables, tokens = {"params": start(model)}, ids()[:1]
  options = {"return_state": True}
  plain, _ = model.apply(variables, tokens, train=False, **options)
  keys = [{"dropout": jax.random.key(seed)} for seed in range(2)]
  first, second = (
    model.apply(variables, tokens, train=True, rngs=rngs, **options)[0]
    for rngs in keys
  )
  for other in (second, plain):
    assert jnp.abs(first - other)[..., 1:].max() > 1e-2


@pytest.mark.parametrize("fields", [{"separator": 9}, {"pool": "cls"}])
def test_parts_of_a_sequence_have_no_second_beginning(fields):
  model = classifier(objective="token_classification", **fields)
  with pytest.raises(ValueError, match="class tokens or with a separator"):
    model.apply({}, ids(), train=False, return_state=True)


def test_the_first_token_may_be_padding_of_an_earlier_part():
  model = classifier(pool="first", positions="none")
  variables = {"params": start(model)}
  tokens = jnp.array([[0, 0, 5, 7], [3, 0, 5, 7]])
  whole = model.apply(variables, tokens, train=False)
  options = {"train": False, "return_state": True}
  _, state = model.apply(variables, tokens[:, :2], **options)
  parts, _ = model.apply(
    variables, tokens[:, 2:], initial_state=state, **options
  )
  np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_model_without_cache_stores_no_state():
  model = build("lru")
  init = functools.partial(model.init, train=False)
  shapes = jax.eval_shape(init, jax.random.key(0), model.example())
  assert cache.CACHE not in shapes


@pytest.mark.slow
def test_cache_refuses_mixers_that_cannot_continue():
  tokens = ids()
  model = build("mega", (("truncation", 3),))
  with pytest.raises(ValueError, match="truncation=3"):
    model.apply(
      {"params": start(model)}, tokens, train=False, mutable=[cache.CACHE]
    )
  model = build("performer")
  with pytest.raises(ValueError, match="cache.*allpass.*s5"):
    model.apply(
      {"params": start(model)}, tokens, train=False, mutable=[cache.CACHE]
    )
  sizes = dict(vocab_size=11, max_len=N, num_classes=2, d_model=8)
  model = models.build("s5", num_layers=1, **sizes)
  with pytest.raises(ValueError, match="mixer.causal=True"):
    model.apply(
      {"params": start(model)}, tokens, train=False, mutable=[cache.CACHE]
    )
