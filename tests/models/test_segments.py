"""Packed rows: every example has the result that it has alone."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import segments
from jaxformers.models.mixer import MIXERS
from tests import initial
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes
from tests.models.test_cache import start

N, SIZES = 16, (3, 9)
# Rows of three and of two examples, of 4, 9, 2 and of 7, 5 tokens.
NUMBERS = np.array(
  [[1] * 4 + [2] * 9 + [3] * 2 + [0], [1] * 7 + [2] * 5 + [0] * 4]
)
# Mixers that read packed rows, and the options that change how.
NATIVE = [
  *(
    (name, options)
    for name in sorted(MIXERS)
    if getattr(MIXERS[name], "has_segments", False)
    for options in ({"causal": True}, {"causal": False})
    if options["causal"] or name not in ("mamba", "rglru")
  ),
  ("softmax", {"causal": True, "rotary": True, "fidelity": 0.5}),
  ("delta", {"causal": True, "num_householder": 2, "forget": True}),
]
# One of each kind: --long tests the others.
SHORT = [
  case
  for case in NATIVE
  if (case[0] in ("lstm", "mlstm", "s5") and not case[1]["causal"])
  or case[0] in ("mamba", "rglru")
  or "rotary" in case[1]
  or "forget" in case[1]
]


def ids():
  drawn = np.random.default_rng(1).integers(1, 11, NUMBERS.shape)
  drawn[1, 8] = 0  # A hole in the second example.
  return np.where(NUMBERS > 0, drawn, 0)


def alone():
  """Each example in its own row, with its row and its places there."""
  for row, numbers in enumerate(NUMBERS):
    for number in range(1, numbers.max() + 1):
      yield row, np.flatnonzero(numbers == number)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    pytest.param(*case.values[0], marks=case.marks)
    for case in slow_except(SHORT[-1:], NATIVE, SHORT)
  ],
)
def test_mixers_read_each_example_as_if_it_were_alone(name, options):
  wiring = {"dtype": jnp.float64} | (
    {"max_len": N} if name == "softmax" else {}
  )
  mixer = MIXERS[name](**small_sizes(name) | options | wiring)
  is_token = ids() > 0
  numbers = np.where(is_token, NUMBERS, -NUMBERS)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(*NUMBERS.shape, 8))

  def run(variables, x, mask):
    y, carry = mixer.apply(variables, x, mask=mask, carry=None, train=False)
    if carry is None:
      return y
    # A second layer continues with the carry of the first.
    return mixer.apply(variables, y, mask=mask, carry=carry, train=False)[0]

  with jax.enable_x64(True):
    packed = segments.make(NUMBERS, None)
    is_here = segments.unpack(packed, jnp.asarray(is_token))

    def in_rows(variables, x):
      y = run(variables, x, jnp.asarray(numbers, jnp.int32))
      return segments.unpack(packed, y)

    def alone(variables, x):
      return run(variables, segments.unpack(packed, x), is_here)

    params = initial.params(mixer, x, mask=is_token, carry=None)
    variables = jax.tree.map(
      lambda p: p + 0.2 * rng.normal(size=p.shape), {"params": params}
    )
    # Results at holes have no meaning.
    weights = is_here[..., None] * rng.normal(size=(*is_here.shape, 8))

    def loss(run, variables, x):
      y = run(variables, x) * is_here[..., None]
      return (y * weights).sum(), y

    got, want = (
      jax.jit(
        jax.value_and_grad(
          functools.partial(loss, run), argnums=(0, 1), has_aux=True
        )
      )(variables, x)
      for run in (in_rows, alone)
    )
  chex.assert_trees_all_close(got, want, atol=1e-10, rtol=1e-10)


def build(name, **fields):
  variant = models.MODELS[name]
  fields = {"num_classes": 3, "positions": "sinusoid", "pool": "mean"} | fields
  return models.build(
    name,
    vocab_size=11,
    max_len=12,
    d_model=8,
    num_layers=2,
    mixer=small_sizes(variant.mixer),
    **fields,
  )


MODELS = (
  ("lru", {"objective": "token_classification", "causal": True}),
  ("s4d", {}),
  ("transformer", {"objective": "language_model", "num_classes": 0}),
  ("transformer", {"positions": "learned", "pool": "max"}),
  ("linear_transformer", {"objective": "language_model", "num_classes": 0}),
  ("transject", {}),
  ("s5", {"block": {"norm_type": "batch"}}),
  ("lru", {"coupled": True, "pool": "first"}),
)


@pytest.mark.parametrize(
  ("name", "fields"),
  [
    pytest.param(*case.values[0], marks=case.marks)
    for case in slow_except(MODELS[3:4], MODELS, MODELS[:3] + MODELS[5:6])
  ],
)
def test_models_give_each_example_its_own_result(name, fields):
  model = build(name, **fields)
  variables, tokens = {"params": start(model)}, ids()

  @jax.jit
  def packed(variables):
    return model.apply(
      variables, tokens, train=False, segments=NUMBERS, sizes=SIZES
    )

  # Examples in rows of one length, so that one program is compiled.
  apart = np.zeros((5, SIZES[1]), int)
  for k, (row, at) in enumerate(alone()):
    apart[k, : len(at)] = tokens[row, at]

  @jax.jit
  def one_by_one(variables):
    return model.apply(variables, apart, train=False)

  y = np.asarray(packed(variables))
  assert y.shape[:2] == (2, SIZES[0] if model.is_pooled else N)
  for (row, at), want in zip(alone(), one_by_one(variables), strict=True):
    if model.is_pooled:
      np.testing.assert_allclose(
        y[row, NUMBERS[row, at[0]] - 1], want, atol=2e-5
      )
      continue
    is_token = tokens[row, at] > 0
    got, want = y[row, at][is_token], np.asarray(want)[: len(at)][is_token]
    np.testing.assert_allclose(got, want, atol=2e-5)


RECURRENCES = [
  name
  for name, variant in models.MODELS.items()
  if variant.mixer not in ("", "softmax")
  and variant.block in ("pre_norm", "one_branch")
  and any(
    getattr(MIXERS[variant.mixer], trait, False)
    for trait in ("has_segments", "has_resets")
  )
]


@pytest.mark.parametrize(
  "name", slow_except(("lru",), RECURRENCES, ("rglru", "s4d"))
)
def test_resets_empty_a_carried_state(name):
  positions = "sinusoid" if name == "lru" else "none"
  model = build(
    name, objective="token_classification", causal=True, positions=positions
  )
  params = start(model)
  tokens = np.random.default_rng(4).integers(1, 11, (2, 16))
  # Padding at the end of a window and within an episode, and before a reset.
  tokens[0, [6, 7, 10]] = tokens[1, [7, 12]] = 0
  resets = np.zeros(tokens.shape, int)
  resets[0, [0, 9]] = resets[1, [3, 7, 13]] = 1
  state, windows = None, []

  @jax.jit
  def read(state, ids, numbers):
    return model.apply(
      {"params": params},
      ids,
      train=False,
      initial_state=state,
      return_state=True,
      segments=numbers,
    )

  for part in (slice(0, 8), slice(8, 16)):
    numbers = 1 + resets[:, part].cumsum(1)
    y, state = read(state, tokens[:, part], numbers)
    windows.append(y)
  got = np.concatenate(windows, 1)
  # Every episode has the results of its tokens without the others.
  packed = segments.make(1 + resets.cumsum(1), None)
  apart = segments.unpack(packed, jnp.asarray(tokens))
  want = jax.jit(lambda ids: model.apply({"params": params}, ids, train=False))
  want = np.asarray(segments.repack(packed, want(apart)))
  at = tokens > 0
  np.testing.assert_allclose(got[at], want[at], atol=2e-5)


@pytest.mark.parametrize("name", slow_except(("lru",), ("lru", "s4d"), ()))
def test_nan_does_not_cross_a_reset(name):
  model = build(
    name, objective="token_classification", causal=True, positions="none"
  )
  params, tokens = start(model), np.full((1, 6), 3)
  read = functools.partial(model.apply, train=False)
  read = jax.jit(read, static_argnames="return_state")
  _, state = read({"params": params}, tokens, return_state=True)
  broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)
  numbers = np.array([[1, 1, 2, 2, 2, 2]])
  got = read({"params": params}, tokens, initial_state=broken, segments=numbers)
  want = read({"params": params}, tokens[:, :4])
  np.testing.assert_allclose(got[:, 2:], want, atol=2e-5)
  assert np.isnan(got[:, :2]).all()


def test_sizes_are_read_from_segments_or_checked():
  packed = segments.make(NUMBERS, None)
  assert packed[1:] == SIZES
  assert segments.make(NUMBERS, (5, 20))[1:] == (5, 20)
  examples = segments.unpack(packed, jnp.asarray(ids()))
  assert examples.shape == (6, 9)
  np.testing.assert_array_equal(segments.repack(packed, examples), ids())
  np.testing.assert_array_equal(
    segments.places(jnp.asarray(NUMBERS))[1, :12],
    [*range(7), *range(5)],
  )


def test_traced_examples_beyond_the_table_of_positions_are_nan():
  options = {"num_classes": 0, "objective": "language_model"}
  model = build("transformer", positions="learned", **options)
  params = start(model)
  tokens = jnp.ones((1, 16), jnp.int32)

  @jax.jit
  def run(numbers):
    return model.apply(
      {"params": params}, tokens, train=False, segments=numbers
    )

  long = np.asarray(run(jnp.ones((1, 16), jnp.int32)))
  assert np.isnan(long[0, 12:]).all()
  short = np.asarray(run(jnp.repeat(jnp.array([[1, 2]]), 8, 1)))
  assert not np.isnan(short).any()


@pytest.mark.parametrize(
  ("numbers", "sizes", "message"),
  [
    (np.ones((2, 3)), None, "integers"),
    (np.ones(3, int), None, r"shape \(3,\)"),
    ([[1, 3]], None, "order of the row"),
    ([[2, 1]], None, "order of the row"),
    ([[1, 1], [1, 3]], None, r"a row has \[1, 3\]"),
    ([[1, 0, 1]], None, "order of the row"),
    ([[1, -1]], None, "order of the row"),
    ([[1, 1, 2]], (1, 2), r"2 examples of up to 2 tokens.*\(1, 2\)"),
    ([[1, 1]], (1, 1), r"1 examples of up to 2 tokens.*\(1, 1\)"),
  ],
)
def test_wrong_segments_are_refused(numbers, sizes, message):
  with pytest.raises(UserError, match=message):
    segments.make(np.asarray(numbers), sizes)


def test_models_that_cannot_read_packed_rows_say_so():
  model = build("s4d")
  with pytest.raises(UserError, match="sizes=\\(most, longest\\)"):
    jax.eval_shape(
      lambda numbers: model.apply(
        {"params": {}}, ids(), train=False, segments=numbers
      ),
      NUMBERS,
    )
  model = build("lru", causal=True)
  with pytest.raises(UserError, match="cannot continue from a state"):
    model.apply({}, ids(), train=False, segments=NUMBERS, return_state=True)
  with pytest.raises(UserError, match="segments have the shape"):
    model.apply({}, ids()[:, :3], train=False, segments=NUMBERS)
  learned = build("lru", positions="learned")
  with pytest.raises(UserError, match="20 tokens is longer than max_len=12"):
    learned.apply(
      {}, np.ones((1, 20), int), train=False, segments=np.ones((1, 20), int)
    )
  images = models.build(
    "transformer",
    vocab_size=0,
    max_len=0,
    image=(4, 4, 3),
    patch_size=2,
    num_classes=2,
    d_model=8,
    num_layers=1,
  )
  with pytest.raises(UserError, match="reads images"):
    images.apply({}, np.ones((1, 4, 4, 3)), train=False, segments=NUMBERS)
  real = models.build(
    "s4d", max_len=12, num_classes=3, d_model=8, num_layers=1, vocab_size=0
  )
  with pytest.raises(UserError, match="no packed rows of real numbers"):
    real.apply({}, np.ones((2, N)), train=False, segments=NUMBERS)


@pytest.mark.slow
def test_pairs_in_packed_rows_have_their_own_results():
  model = build("lru", num_inputs=2, interaction="nli")
  rng = np.random.default_rng(0)
  # Two pairs in each of two rows; their parts differ in length.
  numbers = np.array(
    [[[1] * 4 + [2] * 3, [1] * 2 + [2] * 5], [[1] * 7, [1] * 3 + [0] * 4]]
  )
  tokens = np.where(numbers > 0, rng.integers(1, 11, numbers.shape), 0)
  params = initial.params(model, model.example())
  apply = jax.jit(
    functools.partial(model.apply, train=False), static_argnames="sizes"
  )
  got = apply({"params": params}, tokens, segments=numbers, sizes=(2, 7))
  assert got.shape == (2, 2, 3)
  for row, number in ((0, 1), (0, 2), (1, 1)):
    pair = np.zeros((1, 2, 7), int)
    for part in range(2):
      at = numbers[row, part] == number
      pair[0, part, : at.sum()] = tokens[row, part, at]
    want = apply({"params": params}, pair)[0]
    np.testing.assert_allclose(got[row, number - 1], want, atol=2e-5)
  with pytest.raises(UserError, match=r"\(2, 7\).*\(2, 2, 7\)"):
    model.apply({}, tokens, train=False, segments=numbers[0])
