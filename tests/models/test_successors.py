"""Options of attention after NeuTRENO, against NumPy in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models.capture import capture
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import flash
from jaxformers.models.variables import make_variables
from jaxformers.training.optim import decayed
from tests import draws, initial
from tests.marks import long_except, slow_except
from tests.models.mixers.oracle import small_sizes

B, N, D, H = 2, 11, 8, 2
MASK = np.arange(N)[None] < np.array([[N], [7]])
# Neutral values, with which a mixer is plain attention.
NEUTRAL = {
  "value_residual": 0.0,
  "share_values": False,
  "gate": "none",
  "differential": False,
  "sink": False,
  "centred": False,
}
OPTIONS = (
  {"value_residual": 0.4},
  {"value_residual": 0.4, "learn_value_residual": True},
  {"share_values": True},
  {"gate": "elementwise"},
  {"gate": "headwise"},
  {"sink": True},
  {"centred": True},
  {"differential": True},
  {"value_residual": 0.4, "fidelity": 0.3, "gate": "headwise"},
  {"differential": True, "sink": True, "centred": True, "rotary": True},
)


def name_of(options):
  return ",".join(f"{k}={v}" for k, v in options.items())


def make(**options):
  return MIXERS["softmax"](num_heads=H, max_len=N, **options)


def random_params(layer, x, carry=None, seed=1):
  params = initial.params(layer, x, mask=MASK, carry=carry, seed=seed)
  leaves, tree = jax.tree.flatten(params)
  drawn = [p + draws.normal(i, p.shape, float) for i, p in enumerate(leaves)]
  return jax.tree.unflatten(tree, drawn)


def apply(layer, params, x, carry=None):
  variables = {"params": params}
  return layer.apply(variables, x, mask=MASK, carry=carry, train=False)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def expected(options, params, x, first, layer):
  """The formulas, one head after the other; returns y, and v of the layer."""

  def project(name):
    kernel, bias = params[name]["kernel"], params[name]["bias"]
    return np.einsum("bnd,dhe->bhne", x, kernel) + bias[:, None]

  q, k = project("query"), project("key")
  shares = options.get("share_values") and first is not None
  own = first if shares else project("value")
  v = own
  if first is not None and options.get("value_residual"):
    w = options["value_residual"]
    a, c = params.get("value_residual", (1 - w, w))
    v = a * own + c * first
  if options.get("rotary"):
    pytest.skip("the rotation has its own tests")
  e = q.shape[-1]
  seen = np.broadcast_to(MASK[:, None, None], (B, H, N, N))

  def attention(q, k, sink):
    scores = np.einsum("bhne,bhme->bhnm", q, k) / np.sqrt(q.shape[-1])
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    if options.get("sink"):
      total = total + np.exp(sink)[None, :, None, None]
    weights = weights / total
    if options.get("centred"):
      weights = weights - seen / seen.sum(-1, keepdims=True)
    return weights

  sink = params.get("sink")
  if options.get("differential"):
    c = 0.8 - 0.6 * np.exp(-0.3 * layer)
    a1, b1, a2, b2 = (params[f"lambda_{i}"] for i in ("q1", "k1", "q2", "k2"))
    factor = np.exp(a1 @ b1) - np.exp(a2 @ b2) + c
    half = e // 2
    one, two = (
      attention(q[..., s], k[..., s], sink)
      for s in (slice(0, half), slice(half, e))
    )
    y = (one - factor * two) @ v
    rms = np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-5)
    y = (1 - c) * y / rms * params["head_norm"]["scale"]
  else:
    y = attention(q, k, sink) @ v
  if first is not None and options.get("fidelity"):
    y = y + options["fidelity"] * (first - own)
  if "gate" in params:
    y = y * sigmoid(np.einsum("bnd,dhe->bhne", x, params["gate"]["kernel"]))
  out = params["out"]
  return np.einsum("bhne,hed->bnd", y, out["kernel"]) + out["bias"], own


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=name_of)
def test_every_option_is_its_formula(options, monkeypatch):
  monkeypatch.setattr(flash, "BLOCK", 4)
  with jax.enable_x64(True):
    layer = make(dtype=jnp.float64, **options)
    first, carry = None, None
    for number in range(3):
      x = draws.normal(10 + number, (B, N, D), float)
      params = random_params(layer, x, carry)
      y, carry = apply(layer, params, x, carry)
      numpy = jax.tree.map(np.asarray, params)
      want, v = expected(options, numpy, np.asarray(x), first, number)
      first = v if first is None else first
      np.testing.assert_allclose(y[0], want[0], atol=1e-10, rtol=1e-10)
      np.testing.assert_allclose(y[1, :7], want[1, :7], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", list(NEUTRAL))
def test_neutral_values_are_plain_attention_to_the_bit(name):
  x = draws.normal(3, (B, N, D))
  plain, neutral = make(), make(**{name: NEUTRAL[name]})
  params = initial.params(plain, x, mask=MASK, carry=None)
  chex.assert_trees_all_equal(
    params, initial.params(neutral, x, mask=MASK, carry=None)
  )
  chex.assert_trees_all_equal(
    apply(plain, params, x)[0], apply(neutral, params, x)[0]
  )


def test_gradients_of_sink_and_values_are_those_of_differences(monkeypatch):
  """The backward pass in blocks knows the sink."""
  monkeypatch.setattr(flash, "BLOCK", 4)
  with jax.enable_x64(True):
    layer = make(sink=True, centred=True, dtype=jnp.float64)
    x = draws.normal(5, (B, N, D), float)
    params = random_params(layer, x)
    direction = jax.tree.map(lambda p: draws.normal(7, p.shape, float), params)

    def loss(t):
      moved = jax.tree.map(lambda p, u: p + t * u, params, direction)
      y = apply(layer, moved, x)[0]
      return (jnp.sin(y) * MASK[..., None]).sum()

    slope = jax.grad(loss)(0.0)
    step = 1e-5
    want = (loss(step) - loss(-step)) / (2 * step)
    np.testing.assert_allclose(slope, want, rtol=1e-6)


SIZES = {"vocab_size": 20, "max_len": 12}


def decoder(options, **more):
  return models.build(
    "transformer",
    d_model=16,
    num_layers=3,
    objective="language_model",
    mixer={"num_heads": 2, **options},
    **SIZES,
    **more,
  )


@pytest.mark.parametrize(
  "options",
  long_except([OPTIONS[i] for i in (1, 2, 3, 8, 9)], OPTIONS),
  ids=name_of,
)
def test_tokens_one_by_one_have_the_result_of_the_whole(options):
  model = decoder(options)
  ids = draws.integers(0, (2, 9), 1, 20)
  params = initial.params(model, ids)
  read = functools.partial(model.apply, train=False)
  read = jax.jit(read, static_argnames="return_state")
  whole = read({"params": params}, ids)
  parts, state = [], None
  for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
    y, state = read(
      {"params": params}, part, initial_state=state, return_state=True
    )
    parts.append(y)
  chex.assert_trees_all_close(
    jnp.concatenate(parts, 1)[..., 1:], whole[..., 1:], atol=2e-5
  )


def test_differential_attention_caches_values_once():
  def sizes(options):
    model = decoder(options)
    ids = jnp.ones((1, 3), jnp.int32)
    read = functools.partial(model.apply, train=False, return_state=True)
    _, state = jax.eval_shape(read, {"params": models.shapes(model)}, ids)
    return sum(x.size for x in jax.tree.leaves(state))

  assert sizes({"differential": True}) == sizes({})


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("synthesizer", {"differential": True}, "not all of queries"),
    ("softmax", {"differential": True, "head_size": 3}, "odd size"),
    ("softmax", {"gate": "both"}, "gate"),
    (
      "softmax",
      {"share_values": True, "value_residual": 0.5},
      "value_residual=0.5 compares or mixes",
    ),
    (
      "softmax",
      {"share_values": True, "fidelity": 0.6, "learn_fidelity": True},
      "fidelity=0.6, learn_fidelity=True compares",
    ),
    ("softmax", {"value_residual": 1.5}, "value_residual"),
    (
      "softmax",
      {"differential": True, "rotary": True, "head_size": 2},
      "no multiple of 4",
    ),
  ],
)
def test_options_without_sense_are_refused(name, options, message):
  x = draws.normal(0, (B, N, D))
  with pytest.raises(UserError, match=message):
    layer = MIXERS[name](num_heads=H, max_len=N, **options)
    initial.params(layer, x, mask=MASK, carry=None)


def test_factors_of_differential_attention_have_no_weight_decay():
  x = draws.normal(0, (B, N, D))
  layer = make(differential=True)
  params = initial.params(layer, x, mask=MASK, carry=None)
  names = {name for name, leaf in decayed(params).items() if leaf is True}
  factors = {f"lambda_{name}" for name in ("q1", "k1", "q2", "k2")}
  assert factors <= {*params}
  assert not factors & names


def test_shared_values_leave_out_the_projections():
  x = draws.normal(0, (B, N, D))
  layer = make(share_values=True)
  _, carry = apply(layer, initial.params(layer, x, mask=MASK, carry=None), x)
  later = initial.params(layer, x, mask=MASK, carry=carry)
  assert sorted(later) == ["key", "out", "query"]


@pytest.mark.parametrize(
  "options", [{"differential": True}, {"share_values": True}], ids=name_of
)
@pytest.mark.parametrize(
  "name", slow_except(("linear", "synthesizer", "longformer"), sorted(MIXERS))
)
def test_a_mixer_has_the_options_or_refuses_them(name, options):
  if "fidelity" not in getattr(MIXERS[name], "options", ()):
    pytest.skip("no function of heads")
  x, mask = draws.normal(0, (B, N, D)), jnp.asarray(MASK)
  own = {"max_len": N, "num_heads": H} | small_sizes(name)

  def forms(**options):
    """Returns the shapes of the parameters of the first two layers."""
    mixer = MIXERS[name](**own, **options)

    def layers(key):
      carry, params, outputs = None, [], []
      for _ in range(2):
        (y, carry), variables = mixer.init_with_output(
          key, x, mask=mask, carry=carry, train=False
        )
        params.append(variables["params"])
        outputs.append(y)
      return params, outputs

    params, outputs = jax.jit(layers)(jax.random.key(0))
    assert all(jnp.isfinite(y).all() for y in outputs)
    return jax.tree.map(jnp.shape, params)

  try:
    assert forms(**options) != forms()
  except UserError as error:
    assert next(iter(options)) in str(error)


WITH_VALUES = sorted(
  name
  for name, make in MIXERS.items()
  if "fidelity" in getattr(make, "options", ()) and name not in ("l2",)
)


@pytest.mark.parametrize(
  "name", slow_except(("softmax", "local", "linear"), WITH_VALUES)
)
def test_weights_times_values_are_the_outputs_of_the_heads(name):
  """Attention matrices of every mixer, from values that are the rows of I."""
  mixer = MIXERS[name](**{"max_len": N, "num_heads": H} | small_sizes(name))
  x, mask = draws.normal(0, (B, N, D)), jnp.asarray(MASK)
  params = initial.params(mixer, x, mask=mask, carry=None)
  _, state = mixer.apply(
    {"params": params},
    x,
    mask=mask,
    carry=None,
    train=False,
    mutable=["intermediates", "weights"],
  )
  sown = state["intermediates"]
  weights = state["weights"]["matrix"][0]
  assert weights.shape == (B, H, N, N)
  values = sown["projected"][0]["value"]
  want = np.asarray(sown["attended"][0])
  if name == "ball":
    # Values are projected onto a ball, which starts at RMS norm 1.
    rms = jnp.sqrt(jnp.square(values).mean(-1, keepdims=True))
    values = values / jnp.maximum(rms, 1)
  y = np.einsum("bhnm,bhme->bhne", weights, values)
  # Longformer's first token has other values.
  first = int(name == "longformer")
  for row, end in ((0, N), (1, 7)):
    np.testing.assert_allclose(
      y[row, :, first:end], want[row, :, first:end], atol=2e-5
    )


def test_capture_returns_the_weights_of_every_layer():
  model = decoder({"sink": True, "differential": True})
  ids = draws.integers(0, (2, 9), 1, 20)
  variables = make_variables(model, initial.params(model, ids))
  assert "weights" not in capture(model, variables, ids).heads[0]
  for heads in capture(model, variables, ids, weights=True).heads:
    assert heads["weights"].shape == (2, 2, 9, 9)
    assert not np.triu(heads["weights"], 1).any()
