"""Lipschitz constants of softmax attention, against Jacobians."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import ascent, attention
from jaxformers.models.capture import capture
from jaxformers.models.model import bind_mixer
from jaxformers.models.rotary import rotate
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.marks import long_except

D, H, E = 4, 2, 3


def draw(seed, scale, rotary=False):
  """Returns random heads whose queries and keys have a scale."""
  rng = np.random.default_rng(seed)
  query, key = scale * rng.normal(size=(2, D, H, E + rotary))
  value, out = rng.normal(size=(D, H, E)), rng.normal(size=(H, E, D))
  if rotary:
    value = np.pad(value, ((0, 0), (0, 0), (0, 1)))
    out = np.pad(out, ((0, 0), (0, 1), (0, 0)))
  biases = rng.normal(size=(3, H, E + rotary))
  return attention.Heads(query, key, value, biases, out, np.ones(D), rotary)


def apply(heads, x, causal=False, seen=True):
  """Attends to tokens [n, d], by definition; `seen` is a mask [n, n]."""
  q, k, v = (
    jnp.einsum("nd,dhe->hne", x, kernel) + bias[:, None]
    for kernel, bias in zip(
      (heads.query, heads.key, heads.value), heads.biases, strict=True
    )
  )
  if heads.rotary:
    places = jnp.arange(len(x))[None]
    q, k = (rotate(a[None], places)[0] for a in (q, k))
  scores = jnp.einsum("hne,hme->hnm", q, k)
  scores = scores * heads.query.shape[2] ** -heads.exponent
  if causal:
    seen = jnp.tril(jnp.ones((len(x), len(x)), bool))
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
  y = jnp.einsum("hnm,hme->hne", weights, v)
  return jnp.einsum("hne,hed->nd", y, heads.out) + heads.out_bias


def factors(function, x):
  """Returns factors that distances of tokens and of sequences really grow by.

  They belong to the derivative at x, and are found by power iteration.
  """
  return sizes(jax.jacrev(function)(jnp.asarray(x)))


@functools.cache
def compiled(rotary, causal):
  """Returns a program with the output of heads, and its derivative."""

  def output(arrays, x):
    return apply(attention.Heads(*arrays, rotary), x, causal)

  return jax.jit(lambda a, x: (output(a, x), jax.jacrev(output, 1)(a, x)))


def derive(heads, x, causal):
  """Returns the output of heads at x, and the factors of the derivative."""
  kernels = (heads.query, heads.key, heads.value)
  arrays = (*kernels, heads.biases, heads.out, heads.out_bias)
  output, jacobian = compiled(heads.rotary, causal)(arrays, np.float32(x))
  return np.asarray(output), sizes(jacobian)


def sizes(jacobian):
  """Returns the factors of a derivative [n, d, n, d]."""
  jacobian = np.asarray(jacobian, np.float64)
  n, d = jacobian.shape[:2]
  greatest = 0.0
  for block in jacobian:  # [d, n, d], of one output token.
    step = np.random.default_rng(0).normal(size=(n, d))
    for _ in range(30):
      step /= np.linalg.norm(step, axis=1, keepdims=True) + 1e-30
      output = np.einsum("end,nd->e", block, step)
      step = np.einsum("end,e->nd", block, output)
    greatest = max(greatest, float(np.linalg.norm(output)))
  return greatest, float(np.linalg.norm(jacobian.reshape(n * d, n * d), 2))


def inputs(heads, n, radius, seed):
  """Yields tokens of a norm: random ones, and those of Castin et al.'s code."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(n, D))
  yield radius * x / np.linalg.norm(x, axis=1, keepdims=True)
  both = heads.query[:, 0] @ heads.key[:, 0].T
  values, vectors = np.linalg.eig(both)
  u = np.real(vectors[:, np.real(values).argmax()])
  u *= radius / max(np.linalg.norm(u), 1e-9)
  yield np.stack([u, *[u / 2] * (n - 1)])
  u = np.real(vectors[:, np.real(values).argmin()])
  u *= radius / max(np.linalg.norm(u), 1e-9)
  yield np.stack([-u, *[u] * (n - 1)])


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("count", long_except([6], [6, 60]))
def test_no_derivative_of_attention_is_above_the_constants(count, rotary):
  ratios = []
  for seed in range(count):
    heads = draw(seed, [0.1, 0.5, 2.0][seed % 3], rotary)
    n, radius = 2 + seed % 4, [0.3, 1.0, 3.0][seed % 3]
    for x in inputs(heads, n, radius, seed):
      output, (tokens, frobenius) = derive(heads, x, bool(seed % 2))
      ratios.append(
        (
          tokens / heads.token_constant(radius),
          frobenius / heads.frobenius_constant(radius, n),
        )
      )
      longest = np.linalg.norm(output, axis=1).max()
      assert longest <= heads.reach(radius) * (1 + 1e-5)
  greatest = np.max(ratios, 0)
  assert (greatest <= 1 + 1e-4).all(), greatest


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("count", long_except([6], [6, 60]))
def test_no_derivative_at_a_point_is_above_its_constant(count, rotary):
  """And no constant at a point is above the one for all tokens of its norm."""
  ratios = []
  for seed in range(count):
    heads = draw(seed, [0.1, 0.5, 2.0][seed % 3], rotary)
    n, radius = 2 + seed % 4, [0.3, 1.0, 3.0][seed % 3]
    causal = bool(seed % 2)
    for x in inputs(heads, n, radius, seed):
      _, (_, frobenius) = derive(heads, x, causal)
      point, sink = heads.point_constant(x, causal=causal)
      assert 1 - 1e-9 <= sink <= n + 1e-9
      length = np.linalg.norm(x, axis=1).max()
      everywhere = heads.frobenius_constant(length, n)
      ratios.append((frobenius / point, point / everywhere))
  greatest = np.max(ratios, 0)
  assert (greatest <= 1 + 1e-4).all(), greatest
  # The constants say something.
  assert greatest.min() > 0.4, greatest


def test_a_sink_is_a_token_that_all_tokens_see():
  """Of equal tokens each has the weight 1; of one great key, all weights."""
  heads = draw(0, 0.0)
  assert heads.point_constant(np.ones((5, D)))[1] == pytest.approx(1)
  # The first token of a causal layer is seen by all: 1 + 1/2 + ... + 1/5.
  _, first = heads.point_constant(np.ones((5, D)), causal=True)
  assert first == pytest.approx(sum(1 / i for i in range(1, 6)))
  x = np.ones((5, D))
  x[2] *= 60
  heads = draw(0, 1.0)
  assert heads.point_constant(x)[1] == pytest.approx(5, rel=1e-3)


@pytest.mark.parametrize(
  "options",
  [
    {"mixer": {"causal": True}},
    {"block": {"norm_type": "rms"}},
    {"block": {"norm_first": False}},
  ],
  ids=str,
)
def test_constants_near_sequences_are_below_those_for_all(options):
  model = models.build(
    "transformer",
    vocab_size=9,
    max_len=6,
    num_classes=2,
    d_model=8,
    num_layers=2,
    **options,
  )
  params = initial.params(model, model.example())
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params
  )
  ids = np.random.default_rng(0).integers(1, 9, (4, 6)).astype(np.int32)
  ids[0, 4:] = 0
  captured = capture(model, make_variables(model, params), jnp.asarray(ids))
  rows = attention.near(model, params, captured)
  layers = attention.certify(model, params, 6)["layers"]
  assert len(rows) == len(layers) == 2
  for row, layer in zip(rows, layers, strict=True):
    assert 0.3 * layer["radius"] < row["radius"] <= layer["radius"] * (1 + 1e-6)
    assert row["frobenius"] <= layer["attention_frobenius"]
    assert 1 <= row["sink"] <= 6
  # A padded place changes nothing.
  short = capture(
    model, make_variables(model, params), jnp.asarray(ids[:1, :4])
  )
  padded = captured._replace(
    hidden=tuple(h[:1] for h in captured.hidden), mask=captured.mask[:1]
  )
  for one, other in zip(
    attention.near(model, params, short),
    attention.near(model, params, padded),
    strict=True,
  ):
    assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"rotary": True},
    {"symmetric": True},
    {"head_size": 6},
    {"qkv_bias": False},
    {"use_bias": False},
    {"exponent": 1.0},
    {"orthogonal": True},
    {"orthogonal": True, "orthogonal_output": True},
    {"orthogonal_output": True, "use_bias": False},
  ],
)
def test_heads_are_those_of_the_mixer(options):
  config = models.ModelConfig(
    "transformer",
    vocab_size=9,
    max_len=5,
    num_classes=2,
    d_model=8,
    num_layers=1,
    mixer=options,
  )
  mixer = bind_mixer(config, 5)(parent=None)
  x, mask = draws.normal(0, (1, 5, 8)), jnp.ones((1, 5), bool)
  call = {"mask": mask, "carry": None, "train": False}
  params = mixer.init(jax.random.key(0), x, **call)["params"]
  params = jax.tree.map(lambda a: a + 0.3, params)
  want = mixer.apply({"params": params}, x, **call)[0][0]
  heads = attention.Heads.of(attention.with_kernels(params, mixer), options)
  np.testing.assert_allclose(apply(heads, x[0], False), want, atol=2e-5)


def test_rotary_constants_near_a_sequence_count_its_holes():
  """Tokens at places 0, 7 and 30 see other angles than at 0, 1 and 2."""
  heads = draw(2, 2.0, rotary=True)
  places = np.array([0, 7, 30])
  x = np.random.default_rng(0).normal(size=(3, D))

  def function(x):
    holes = jnp.zeros((31, D)).at[places].set(x)
    seen = jnp.zeros((31, 31), bool).at[:, places].set(True)
    return apply(heads, holes, seen=seen)[places]

  _, found = factors(function, x)
  constant, sink = heads.point_constant(x, places=places)
  assert 0.02 * constant < found <= constant * (1 + 1e-6)
  other, other_sink = heads.point_constant(x)
  assert other != pytest.approx(constant, rel=1e-3)
  assert other_sink != pytest.approx(sink, rel=1e-3)


def test_deep_encoders_have_constants():
  model = models.build(
    "transformer",
    vocab_size=9,
    max_len=5,
    num_classes=2,
    d_model=8,
    num_layers=60,
  )
  found = attention.certify(model, initial.params(model, model.example()), 5)
  assert 309 < found["log10"]["tokens"] < found["log10"]["frobenius"]


@pytest.mark.slow
def test_no_search_breaks_the_constant_of_a_capped_transformer():
  """Two layers, weights at their caps, steps of one token and of all."""
  model = models.build(
    "capped_transformer",
    vocab_size=9,
    max_len=6,
    num_classes=2,
    d_model=8,
    num_layers=2,
    mixer={"num_heads": 4},
    block={"mlp_dim": 8},
    positions="none",
  )
  params = initial.params(model, model.example())
  eye = np.eye(8, dtype=np.float32)
  for i in range(2):
    layer = params["encoder"][f"layer_{i}"]
    layer |= {
      "mixer": {
        name: {"kernel": eye.reshape(kernel["kernel"].shape)}
        for name, kernel in layer["mixer"].items()
      },
      "up": {"kernel": eye},
      "down": {"kernel": eye},
    }
  table = params["encoder"]["embedding"]["tokens"]
  table["embedding"] = table["embedding"] * 10
  certificate = attention.certify(model, params, 6)
  limit, ball = 10 ** certificate["log10"]["tokens"], certificate["ball"]
  longest = np.linalg.norm(table["embedding"], axis=1).max()
  assert ball == pytest.approx(longest, rel=1e-6)
  ids = jnp.asarray(np.random.default_rng(0).integers(1, 9, (4, 6)), jnp.int32)
  found = ascent.adversarial(
    model, params, ids, kinds=["farthest"], ball=ball, steps=100
  )["farthest"][1]
  assert 0.2 * limit < found <= limit


def test_norms_of_whole_matrices_are_no_constant_for_several_heads():
  """As published by Newhouse et al.: one head can hold all of a token."""
  eye = np.eye(8).reshape(8, 4, 2)
  heads = attention.Heads(
    query=-eye,
    key=eye,
    value=eye,
    biases=np.zeros((3, 4, 2)),
    out=np.moveaxis(eye, 0, 2),
    out_bias=np.zeros(8),
    exponent=1.0,
  )
  # Tokens of root mean square 1 or less, all in the channels of one head.
  radius, u = 8**0.5, np.eye(8)[0]
  x = radius * np.stack([u, *[-u / 2] * 8])
  found, _ = factors(functools.partial(apply, heads, causal=False), x)
  # Their formula: (w_V + 2 w_V r^2 w_Q w_K) w_O / 3, with all norms 1.
  assert found / 3 > 1.1 * (1 + 2) / 3


def test_constants_are_attained_by_one_head():
  """Scores between tokens R u and -R u: the constants lose little."""
  eye = np.eye(D)[:, None]
  blank = np.zeros((3, 1, D))
  heads = attention.Heads(
    -eye, eye, eye, blank, np.swapaxes(eye, 0, 1), blank[0, 0]
  )
  radius, best = 2.0, 0.0
  u = np.eye(D)[0]
  for share in np.linspace(0.05, 1, 40):
    x = radius * np.stack([u, -share * u])
    tokens, _ = factors(functools.partial(apply, heads, causal=False), x)
    best = max(best, tokens / heads.token_constant(radius))
  # With one token, attention is the map of the value and the output.
  one, _ = factors(
    functools.partial(apply, heads, causal=True), radius * u[None]
  )
  assert one == pytest.approx(1)
  assert 0.25 < best <= 1


@pytest.mark.parametrize(
  "options",
  [
    {"name": "transformer"},
    {"name": "transformer", "block": {"norm_first": False}},
    {"name": "symmetric_transformer", "block": {"norm_type": "rms"}},
    {"name": "transformer_rezero"},
    {"name": "transformer", "block": {"norm_epsilon": 1.0}},
    {
      "name": "transformer",
      "block": {"norm_epsilon": 1.0, "norm_first": False},
      "positions": "sinusoid",
      "pool": "cls",
    },
    {"name": "neutreno", "block": {"norm_first": False}},
    {"name": "transformer_orthogonal", "block": {"norm_epsilon": 1.0}},
    {
      "name": "transformer",
      "block": {"norm_epsilon": 1.0, "orthogonal": True, "mlp_dim": 6},
    },
  ],
)
def test_no_derivative_of_an_encoder_is_above_its_constant(options):
  model = models.build(
    vocab_size=9,
    max_len=5,
    num_classes=2,
    d_model=4,
    num_layers=2,
    **{"positions": "learned", **options},
  )
  params = initial.params(model, model.example())
  # Large weights, and residuals that are not 0.
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: x + 0.5 * rng.normal(size=x.shape).astype(np.float32), params
  )
  ids = jnp.array([[3, 1, 4, 8, 5]])
  variables = make_variables(model, params)
  start = capture(model, variables, ids).hidden[0]

  def last(x):
    change = {"encoder": {"embedded": x[None] - start}}
    return capture(model, {**variables, "perturbations": change}, ids).hidden[
      -1
    ][0]

  found = attention.certify(model, params, 5)
  logs = {
    k: sum(np.log10(row[k]) for row in found["layers"]) for k in attention.KINDS
  }
  has_norms = options["name"] != "transformer_rezero"
  is_steep = has_norms and "norm_epsilon" not in options.get("block", {})
  assert (found["norm"] > 100) == is_steep
  # Tokens whose channels are nearly equal have the greatest derivatives.
  flat = jnp.ones(start[0].shape)
  flat += 1e-4 * rng.normal(size=flat.shape)
  for x in (start[0], *([flat, start[0] * 0.01] if has_norms else [])):
    for kind, value in zip(attention.KINDS, factors(last, x), strict=True):
      assert np.log10(value) <= logs[kind] + 1e-5
  if model.stacks()["encoder"].final_norm:
    assert found["log10"]["tokens"] > logs["tokens"]


def test_fidelity_is_counted_in_the_constants(monkeypatch):
  """Without its term, a constant of NeuTRENO is smaller than a derivative."""
  model = models.build(
    "transformer_rezero",
    vocab_size=9,
    max_len=5,
    num_classes=2,
    d_model=4,
    num_layers=2,
    positions="learned",
    mixer={"fidelity": 20.0},
  )

  def change(path, leaf):
    # Attention with the weight 1, and no feed-forward.
    name = jax.tree_util.keystr(path)
    return 0 * leaf + 1 if "residual" in name else leaf * ("down" not in name)

  params = initial.params(model, model.example())
  params = jax.tree_util.tree_map_with_path(change, params)
  ids = jnp.array([[3, 1, 4, 8, 5]])
  variables = make_variables(model, params)
  start = capture(model, variables, ids).hidden[0]

  def last(x):
    moved = {"encoder": {"embedded": x[None] - start}}
    more = {**variables, "perturbations": moved}
    return capture(model, more, ids).hidden[-1][0]

  found = np.log10(factors(last, start[0]))
  logs = [*attention.certify(model, params, 5)["log10"].values()]
  assert (found <= logs).all() and (found > np.array(logs) - 1.2).all()
  monkeypatch.setattr(attention, "_fidelity", lambda *_: 0.0)
  logs = [*attention.certify(model, params, 5)["log10"].values()]
  assert found[0] > logs[0]


@pytest.mark.parametrize(
  ("name", "options", "reason"),
  [
    ("neutreno", {"mixer": {"feat_scale": True}}, "feat_scale"),
    ("s5", {}, "softmax"),
    ("transformer", {"block": {"norm_type": "scale"}}, "norm_type=scale"),
    ("transformer_rezero", {"embedding": {"cutoffs": (3,)}}, "greatest norm"),
    *(
      ("transformer", {"mixer": {name: value}}, name)
      for name, value in (
        ("sink", True),
        ("centred", True),
        ("gate", "headwise"),
        ("differential", True),
        ("share_values", True),
        ("value_residual", 0.5),
        ("learn_value_residual", True),
      )
    ),
    *(
      ("transformer", {"block": {name: value}}, name)
      for name, value in (
        ("streams", 2),
        ("norm_after", True),
        ("norm_scaling", True),
      )
    ),
  ],
)
def test_missing_constants_have_a_reason(name, options, reason):
  model = models.build(
    name,
    vocab_size=9,
    max_len=5,
    num_classes=2,
    d_model=4,
    num_layers=1,
    **options,
  )
  found = attention.certify(model, initial.params(model, model.example()), 5)
  assert reason in found["missing"] and "log10" not in found
