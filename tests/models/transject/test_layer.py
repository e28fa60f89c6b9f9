"""TransJect's pieces, and what the paper promises of the whole."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import models, orthogonal
from jaxformers.models.activations import maxmin
from jaxformers.models.blocks import invertible
from jaxformers.models.capture import capture
from jaxformers.models.mixer import MIXERS
from jaxformers.models.reductions import masked_mean
from jaxformers.models.transject import layer as t
from jaxformers.models.transject import sigma as sigmas
from jaxformers.models.variables import DERIVED, make_variables, of_stack
from tests import draws, initial
from tests.marks import long_except
from tests.models.transject.examples import (
  build,
  compiled,
  encoder,
  normal,
  prefix,
)


def scales(params, num_layers):
  """The actual a_l of every layer."""
  layers = params["encoder"]
  return np.array(
    [
      t.residual_weight(layers[f"layer_{i}"]["residual"]["alpha"]) / num_layers
      for i in range(num_layers)
    ],
    np.float64,
  )


def hidden(model, params, ids):
  _, state = compiled(model)({"params": params}, ids)
  return state["intermediates"]["encoder"]["hidden"]


def test_the_residual_weight_is_in_0_1_and_starts_at_0_with_a_slope():
  r = jnp.array([-100.0, -9.0, -1.0, 0.0, 0.5, 9.0, 100.0])
  alpha = t.residual_weight(r)
  assert (alpha >= 0).all()
  assert (alpha < 1).all()
  assert t.residual_weight(jnp.zeros(())) == 0
  assert jax.grad(t.residual_weight)(0.0) == pytest.approx(1, abs=1e-5)
  assert jax.grad(t.residual_weight)(-1e-3) == pytest.approx(-1, abs=1e-5)


@pytest.mark.parametrize("n", [3, 20])  # Fewer tokens than channels, and more.
@pytest.mark.parametrize("shared", [False, True])
def test_expert_outputs_are_the_formula_in_both_orders(n, shared):
  x, u, v = normal(0, 2, n, 6), normal(1, 3, 6, 6), normal(2, 3, 6, 6)
  sigma = draws.uniform(3, (1 if shared else 2, 6))
  known = t.folded(u, sigma, v) if shared and n == 3 else None
  experts = t.Experts(u, v, jnp.ones(6), jnp.ones(()), known)
  f = t.expert_outputs(x, experts, sigma)
  for e in range(3):
    for b in range(2):
      s = np.diag(np.asarray(sigma[0 if shared else b], np.float64))
      y = np.asarray(x[b], np.float64) @ u[e] @ s @ v[e]
      want = np.where(y > 0, y, np.expm1(np.minimum(y, 0)))
      np.testing.assert_allclose(f[e][b], want, atol=2e-5)


@pytest.mark.slow
def test_orthogonal_attention_is_x_u_sigma_v():
  """Theorem 1 of the paper, with U and V of its proof, which depend on X."""
  n, d = 9, 4
  x, mask = normal(0, 1, n, d), jnp.ones((1, n), bool)
  # Project by rotations, as the Transformer with orthogonal parameters does.
  mixer = MIXERS["softmax"](num_heads=1, orthogonal=True, use_bias=False)
  kw = {"mask": mask, "carry": None, "train": False}
  variables = {"params": initial.params(mixer, x, seed=1, **kw)}
  _, state = mixer.apply(variables, x, **kw, mutable=["intermediates"])
  projected = state["intermediates"]["projected"][0]
  q, k, v = (projected[name][0, 0] for name in ("query", "key", "value"))
  w_q, w_k, w_v = (jnp.linalg.lstsq(x[0], a)[0] for a in (q, k, v))
  # Decompose x.T x; U and V are orthogonal.
  eigenvalues, basis = jnp.linalg.eigh(x[0].T @ x[0])
  u, v_matrix = w_q @ w_k.T @ basis, basis.T @ w_v
  for matrix in (u, v_matrix):
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=2e-5)
  # Sigma of the model is that of the paper, over its maximum.
  sigma, _ = sigmas.eigenvalues(x, basis, mask)
  top = eigenvalues.max()
  np.testing.assert_allclose(sigma[0], eigenvalues / top, atol=1e-6)
  # Attention without its softmax, over the same maximum.
  want = (q @ k.T) @ v / top
  y = x[0] @ t.folded(u[None], sigma, v_matrix[None])[0]
  np.testing.assert_allclose(y, want, atol=2e-5)
  # The largest singular value of X bounds it.
  norm = functools.partial(jnp.linalg.norm, ord=2)
  assert norm(want) <= norm(x[0]) * (1 + 1e-6)
  assert norm(want) > 0.3 * norm(x[0])


@pytest.mark.parametrize(
  "activations", long_except(("stored",), ("stored", "reversible"))
)
@pytest.mark.slow
def test_make_variables_folds_what_every_call_folds(activations):
  model = models.build(
    "random_transject",
    vocab_size=30,
    max_len=24,
    num_classes=2,
    d_model=8,
    num_layers=2,
    memory=activations,
  )
  ids = draws.integers(0, (3, 12), 1, 30)
  params = initial.params(model, ids)
  for i in range(2):
    params["encoder"][f"layer_{i}"]["residual"]["alpha"] = jnp.float32(0.7)

  def loss(params, prepare):
    return jnp.square(model.apply(prepare(params), ids, train=False)).sum()

  grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  once = grad(params, lambda p: make_variables(model, p))
  chex.assert_trees_all_close(
    once, grad(params, lambda p: {"params": p}), atol=1e-5
  )
  variables = make_variables(model, params)
  assert variables[DERIVED]["encoder"].keys() == {"layer_0", "layer_1"}
  known = jax.tree.map(jnp.zeros_like, variables[DERIVED])
  other = model.apply(variables | {DERIVED: known}, ids, train=False)
  assert jnp.abs(other - model.apply(variables, ids, train=False)).max() > 1e-3


def test_make_variables_folds_nothing_for_sample_dependent_sigma():
  model, params, _ = encoder(2, 3, 0.5)
  assert make_variables(model, params)[DERIVED] == {"encoder": {}}


def test_expert_outputs_of_a_large_batch_make_no_d_cubed_array():
  """U V of a pair of channels, which a product of three in one call makes."""
  b, n, d = 9, 7, 5

  def loss(u, sigma, v, x):
    experts = t.Experts(u, v, jnp.ones(d), jnp.ones(()))
    return sum(y.sum() for y in t.expert_outputs(x, experts, sigma))

  shapes = [(2, d, d), (b, d), (2, d, d), (b, n, d)]
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args))
  assert f"f32[{b},{d},{d}]" in text
  assert f"f32[{d},{d},{d}]" not in text


def test_alpha_zero_is_the_identity():
  model, params, ids = encoder(3, 4, 0.0)
  first, *layers = hidden(model, params, ids)
  for layer in layers:
    chex.assert_trees_all_equal(layer, first)


@given(
  seed=st.integers(0, 50),
  sizes=st.sampled_from([(1, 1), (3, 3)]),
  alpha=st.floats(0.05, 0.98),
)
@pytest.mark.slow
def test_token_pairs_stay_within_the_bounds(seed, sizes, alpha):
  num_layers, num_experts = sizes
  model, params, ids = encoder(num_layers, num_experts, alpha, seed)
  states = hidden(model, params, ids)

  def distances(x):
    x = np.asarray(x, np.float64)
    return np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)

  pairs = ~np.eye(12, dtype=bool)
  start, end = distances(states[0])[:, pairs], distances(states[-1])[:, pairs]
  a = scales(params, num_layers)
  assert (a > 0).all()
  assert (a < 1 / num_layers).all()
  low, high = np.prod((1 - a) ** 2), np.prod((1 + a) ** 2)
  assert (start > 0).all()
  assert (end >= low * start * (1 - 1e-5)).all()
  assert (end <= high * start * (1 + 1e-5)).all()


@given(alpha=st.floats(0.1, 0.99), num_layers=st.integers(1, 4))
def test_the_upper_bound_is_attained(alpha, num_layers):
  """All matrices the identity, no bias, positive tokens: x grows by (1+a)^2."""
  a = alpha / num_layers
  x = np.abs(normal(0, 1, 5, 6)) + 1
  eye = jnp.eye(6)[None]
  y = x
  for _ in range(num_layers):
    experts = t.Experts(eye, eye, jnp.ones(6), jnp.float32(a))
    (f,) = t.expert_outputs(jnp.asarray(y), experts, jnp.ones((1, 6)))
    y = y + a * f
    y = y + a * t.orthogonal_feed_forward(
      y, jnp.repeat(eye, 2, 0), jnp.zeros((2, 6))
    )
  np.testing.assert_allclose(y, x * (1 + a) ** (2 * num_layers), rtol=2e-6)


def test_one_expert_and_learned_sigma_mix_no_tokens():
  model = models.build(
    "random_transject",
    vocab_size=30,
    max_len=9,
    num_classes=2,
    d_model=8,
    num_layers=2,
    mixer={"num_experts": 1},
  )
  ids = jnp.arange(1, 10)[None]
  params = initial.params(model, ids)
  for i in range(2):
    params["encoder"][f"layer_{i}"]["residual"]["alpha"] = jnp.float32(1.0)
  before = hidden(model, params, ids)[-1]
  after = hidden(model, params, ids.at[0, 3].set(29))[-1]
  moved = np.any(np.asarray(before != after), axis=-1)[0]
  assert moved.tolist() == [i == 3 for i in range(9)]


def turn(angle):
  c, s = np.cos(angle), np.sin(angle)
  return [[c, s], [-s, c]]


def two_experts(x, w, gating):
  """x + a sum_e lambda_e ELU(x U_e), U_e a turn by 0 and by 90 degrees."""
  u = jnp.asarray([turn(0.0), turn(np.pi / 2)])
  v, sigma = jnp.stack([jnp.eye(2)] * 2), jnp.ones((1, 2))
  experts = t.Experts(u, v, jnp.asarray(w), jnp.asarray(0.45))
  x = jnp.asarray(x)[:, None]  # A token a sample.
  y, _ = t.mixture(
    x, experts, sigma, jnp.ones((len(x), 1), bool), gating=gating
  )
  return np.asarray(x + y)[:, 0]


@pytest.mark.slow
def test_the_gate_of_the_paper_lets_different_inputs_collide():
  """Three inputs, further apart than 3, that one layer maps to one output."""
  with jax.enable_x64(True):
    w = [2.83, 2.83]
    x = np.array([[20.0, 0.0], [22.057552, -5.422975], [16.929031, 3.078293]])
    y = two_experts(x, w, "paper")[0]
    # From six digits to all of them.
    x[1:] = [
      scipy.optimize.fsolve(
        lambda x: two_experts(x[None], w, "paper")[0] - y, one, xtol=1e-12
      )
      for one in x[1:]
    ]
    assert min(np.linalg.norm(x[i] - x[i - 1]) for i in range(3)) > 3
    # float32 is what the gate computes in.
    np.testing.assert_allclose(
      two_experts(x, w, "paper"), y[None].repeat(3, 0), atol=1e-4
    )
    w = np.array([[2.83, 2.83], [-2.83, 2.83]])
    apart = two_experts(x, w, "certified")
    for i in range(3):
      start, end = (np.linalg.norm(z[i] - z[i - 1]) for z in (x, apart))
      assert end >= (1 - 0.45) * start


@functools.cache
def certified(num_layers, num_experts):
  """A forward pass from embedded tokens: what they were, and the end."""
  model = build(num_layers, num_experts, 8, sigma="learned", gating="certified")

  def run(params, embedded, ids):
    own = make_variables(model, params)
    found = capture(model, own, ids, embedded)
    return found.hidden[0], found.hidden[-1]

  return jax.jit(run)


@given(
  seed=st.integers(0, 99),
  sizes=st.sampled_from([(1, 4), (3, 2)]),
  alpha=st.floats(0.05, 0.98),
  gate=st.floats(1.0, 100.0),
  size=st.floats(0.1, 100.0),
  turn=st.floats(0.5, 20.0),
  length=st.integers(1, 12),
)
@pytest.mark.slow
def test_sequences_stay_within_the_bounds_of_the_certified_gate(
  seed, sizes, alpha, gate, size, turn, length
):
  num_layers, num_experts = sizes
  run = certified(num_layers, num_experts)
  _, params, ids = encoder(
    num_layers, num_experts, alpha, seed, sigma="learned", gating="certified"
  )
  for i in range(num_layers):
    mixer = params["encoder"][f"layer_{i}"]["mixer"]
    mixer["gate"] = gate * normal(i, *mixer["gate"].shape)
  ids = jnp.where(prefix([length], 12), ids, 0)
  mask = ids > 0
  x = size * normal(seed, 2, 12, 8)
  # Where the first gate is undecided, and about as far as it takes to decide.
  h = masked_mean(x, mask)[0]
  mixer = params["encoder"]["layer_0"]["mixer"]
  mixer["gate"] -= jnp.outer(mixer["gate"] @ h, h) / (h @ h)
  other = x + size * turn / gate * normal(seed + 1, 2, 12, 8)
  ends = [run(params, one, ids) for one in (x, other)]
  before, after = (
    np.sqrt(
      np.square(np.where(mask[..., None], np.float64(a) - b, 0)).sum((1, 2))
    )
    for a, b in zip(*ends, strict=True)
  )
  a = scales(params, num_layers)
  slack = 1e-4  # A hundredth of the tokens' size, in float32.
  assert (after >= np.prod((1 - a) ** 2) * before * (1 - slack)).all()
  assert (after <= np.prod((1 + a) ** 2) * before * (1 + slack)).all()


@pytest.mark.parametrize("gating", ["paper", "certified"])
def test_a_single_expert_moves_sequences_like_tokens(gating):
  """Its gate is 1, so the certificate needs no bound on the norm."""
  model, params, _ = encoder(2, 1, 0.5, sigma="learned", gating=gating)
  layers = invertible.layers_of(model.stacks()["encoder"])
  variables = of_stack(make_variables(model, params), "encoder")
  sigma = invertible.shared_by_all(layers, variables, 8)
  for weights in layers.weights(variables):
    certificate = layers.certificate(weights, sigma, 1e6)
    assert certificate["sequences"] == certificate["tokens"]
    change = layers.bound(weights, sigma)(invertible.Change.within(1.0, 4), 4)
    assert change.norm == pytest.approx(certificate["sequences"][1])
  assert layers.scope() == "Two sequences under one mask"
  assert layers.remarks(bounded=False) == []


def test_a_stochastic_matrix_can_stretch_by_the_root_of_its_size():
  """Corollary 1 takes eigenvalues; what stretches is the singular value."""
  attention = np.zeros((100, 100))
  attention[:, 0] = 1  # Every token looks at the first.
  assert np.abs(np.linalg.eigvals(attention)).max() == pytest.approx(1)
  assert np.linalg.norm(attention, 2) == pytest.approx(10)


@pytest.mark.slow
def test_transject_has_many_negative_activations():
  """So the logarithm in the paper's entropy, equation 10, does not exist."""
  model, params, ids = encoder(2, 2, 0.5, d=32)
  for x in hidden(model, params, ids):
    assert 0.25 < np.mean(np.asarray(x) < 0) < 0.6


def test_maxmin_sorts_pairs_and_keeps_norms():
  x = draws.normal(0, (2, 3, 6))
  y = maxmin(x)
  left, right = jnp.split(x, 2, -1)
  chex.assert_trees_all_equal(y[..., :3], jnp.maximum(left, right))
  chex.assert_trees_all_equal(y[..., 3:], jnp.minimum(left, right))
  w = jnp.stack([orthogonal.cayley(draws.normal(k, (6, 6))) for k in (1, 2)])
  got, back = jax.vjp(
    lambda x: t.orthogonal_feed_forward(x, w, jnp.zeros((2, 6)), "maxmin"), x
  )
  # The norms of tokens and of gradients stay; ELU lessens them.
  for one, other in ((got, x), (back(y)[0], y)):
    np.testing.assert_allclose(
      jnp.linalg.norm(one, axis=-1), jnp.linalg.norm(other, axis=-1), rtol=1e-5
    )


def test_orthogonal_feed_forward_is_the_formula():
  x = draws.normal(0, (1, 5, 4))
  w = draws.normal(1, (2, 4, 4))
  b = draws.normal(2, (2, 4))
  y = np.asarray(x, np.float64)
  for i in range(2):
    y = y @ np.asarray(w[i], np.float64) + np.asarray(b[i], np.float64)
    y = np.where(y > 0, y, np.expm1(np.minimum(y, 0)))
  np.testing.assert_allclose(t.orthogonal_feed_forward(x, w, b), y, atol=1e-5)


expm = jax.jit(orthogonal.expm)


def drawn(rng, *shape):
  return rng.normal(size=shape).astype(jnp.result_type(float))


@given(
  seed=st.integers(0, 99),
  num_layers=st.sampled_from([2, 6]),
  alpha=st.floats(0.0, 0.99),
  tokens=st.lists(st.integers(1, 7), min_size=2, max_size=2),
)
@pytest.mark.parametrize(
  "dtype", ["float32", pytest.param("float64", marks=pytest.mark.long)]
)
def test_undoing_a_layer_gives_its_input(
  dtype, seed, num_layers, alpha, tokens
):
  x64 = dtype == "float64"
  with jax.enable_x64(x64):
    rng = np.random.default_rng(seed)
    d, count = 6, 3
    # The gate is float32 whatever the type is; it is given on the way back.
    experts = t.Experts(
      expm(drawn(rng, count, d, d)),
      expm(drawn(rng, count, d, d)),
      5 * drawn(rng, d),
      np.asarray(alpha / num_layers),
    )
    w = expm(drawn(rng, 2, d, d))
    weights = t.Weights(experts, w, drawn(rng, 2, d))
    weights = jax.tree.map(lambda a: a.astype(dtype), weights)
    layers = t.TransJectLayers(
      num_layers, "paper", "learned", 0.0, "cayley", jnp.dtype(dtype), count
    )
    x = drawn(rng, 2, 7, d).astype(dtype)
    sigma = rng.uniform(size=(2, d)).astype(dtype)
    mask = np.arange(7)[None] < np.asarray(tokens)[:, None]
    y, side = jitted("forward", layers)(weights, x, sigma, mask)
    back = jitted("inverse", layers)(weights, y, sigma, mask, side)
    scale = np.abs(np.asarray(y)).max()
    error = np.abs(np.asarray(back) - x).max()
    # The branch changes by at most 2 alpha / L times a change of its input, so
    # the inverse enlarges rounding by up to 1 / (1 - 2 alpha / L).
    rounding = (1e-12 if x64 else 4e-6) * scale
    assert error <= rounding / (1 - 2 * alpha / num_layers)
    # Fewer steps than the limit are enough.
    early = jitted("inverse", layers, max_steps=60 if x64 else 30)
    chex.assert_trees_all_equal(early(weights, y, sigma, mask, side), back)
    if alpha > 0.01:
      assert float(jnp.abs(back - y).max()) > error


@functools.cache
def jitted(name, layers, **how):
  function = getattr(invertible, name)
  return jax.jit(functools.partial(function, layers, **how))


@pytest.mark.parametrize("gating", ["paper", "certified"])
def test_mixture_is_the_gated_average_of_the_parts(gating):
  model, params, ids = encoder(1, 3, 0.5, gating=gating)
  variables = make_variables(model, params)
  layers = invertible.layers_of(model.stacks()["encoder"])
  (weights,) = layers.weights(of_stack(variables, "encoder"))
  captured = capture(model, variables, ids)
  x, sigma, gate = captured.hidden[0], captured.sigma, captured.gates[0]
  mixed, _ = t.mixture(
    x, weights.experts, sigma, ids > 0, gating=gating, weights=gate
  )
  parts = layers.parts(weights, x, sigma)
  average = jnp.einsum("be,bend->bnd", gate, parts)
  chex.assert_trees_all_close(average, x + mixed, atol=1e-5)
