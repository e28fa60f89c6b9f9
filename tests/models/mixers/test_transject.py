"""TransJect's pieces, and what the paper promises of the whole."""

import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import models, orthogonal
from jaxformers.analysis.tokens import capture as capturing
from jaxformers.models.attention import masked_mean
from jaxformers.models.mixers import transject as t
from jaxformers.models.variables import make_variables
from jaxformers.training import steps
from tests import initial
from tests.marks import long_except

SMALL = {"num_experts": 2}


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def prefix(lengths, n):
  return jnp.arange(n)[None] < jnp.asarray(lengths)[:, None]


@functools.cache  # Compiled once for all examples of a property.
def build(num_layers, num_experts, d, sigma="eigenvalues", gating="paper"):
  return models.build(
    "transject",
    vocab_size=30,
    max_len=24,
    num_classes=2,
    d_model=d,
    num_layers=num_layers,
    mixer={"num_experts": num_experts, "sigma": sigma, "gating": gating},
  )


@functools.cache
def compiled(model):
  """The model's init and its apply, which returns hidden states too."""
  kw = {"train": False}
  apply = functools.partial(model.apply, mutable=["intermediates"], **kw)
  return jax.jit(functools.partial(model.init, **kw)), jax.jit(apply)


def encoder(num_layers, num_experts, alpha, seed=0, d=8, **mixer):
  """A model, its parameters with every |tanh r| = alpha, and ids."""
  model = build(num_layers, num_experts, d, **mixer)
  ids = jax.random.randint(jax.random.key(seed), (2, 12), 1, 30)
  params = compiled(model)[0](jax.random.key(seed), ids)["params"]
  flat = flax.traverse_util.flatten_dict(params)
  for path, leaf in flat.items():
    if path[-1] == "alpha":
      flat[path] = jnp.full_like(leaf, np.arctanh(alpha))
    elif path[-1] == "bias" and leaf.shape == (2, d):
      flat[path] = normal(seed, 2, d)
  return model, flax.traverse_util.unflatten_dict(flat), ids


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
  _, state = compiled(model)[1]({"params": params}, ids)
  return state["intermediates"]["encoder"]["hidden"]


def test_the_residual_weight_is_in_0_1_and_starts_at_0_with_a_slope():
  r = jnp.array([-100.0, -9.0, -1.0, 0.0, 0.5, 9.0, 100.0])
  alpha = t.residual_weight(r)
  assert (alpha >= 0).all()
  assert (alpha < 1).all()
  assert t.residual_weight(jnp.zeros(())) == 0
  assert jax.grad(t.residual_weight)(0.0) == pytest.approx(1, abs=1e-5)
  assert jax.grad(t.residual_weight)(-1e-3) == pytest.approx(-1, abs=1e-5)


def test_sigma_is_the_least_squares_diagonal_over_its_maximum():
  x, mask = normal(0, 2, 9, 4), prefix([9, 6], 9)
  basis = orthogonal.cayley(normal(1, 4, 4))
  sigma, error = t.eigenvalues(x, basis, mask)
  for b, length in enumerate([9, 6]):
    tokens = np.asarray(x[b, :length], np.float64)
    gram = tokens.T @ tokens / length
    best = np.diag(np.asarray(basis, np.float64).T @ gram @ basis)
    np.testing.assert_allclose(sigma[b], best / best.max(), atol=1e-6)
    rest = gram - basis @ np.diag(best) @ basis.T
    np.testing.assert_allclose(error[b], np.sum(rest**2), rtol=1e-4)


def test_sigma_of_the_eigenvectors_has_no_error():
  x = normal(0, 1, 9, 4)
  _, vectors = np.linalg.eigh(np.asarray(x[0]).T @ np.asarray(x[0]))
  _, error = t.eigenvalues(x, jnp.asarray(vectors), jnp.ones((1, 9), bool))
  assert float(error[0]) < 1e-5


def test_the_reconstruction_error_beside_the_authors():
  """Theirs is the mean over the entries of x.T x itself."""
  n, d = 9, 4
  x, basis = normal(0, 1, n, d), orthogonal.cayley(normal(1, d, d))
  gram = np.asarray(x[0]).T @ np.asarray(x[0])
  turned = np.asarray(basis).T @ gram @ np.asarray(basis)
  theirs = np.square(turned - np.diag(np.diag(turned))).mean()
  _, error = t.eigenvalues(x, basis, jnp.ones((1, n), bool))
  np.testing.assert_allclose(error[0], theirs * d**2 / n**2, rtol=1e-4)


def test_the_reconstruction_error_fits_the_basis_not_the_tokens():
  x, mask = normal(0, 1, 9, 4), jnp.ones((1, 9), bool)
  basis = orthogonal.cayley(normal(1, 4, 4))
  by_x, by_basis = jax.grad(
    lambda x, q: t.eigenvalues(x, q, mask)[1].sum(), argnums=(0, 1)
  )(x, basis)
  assert not np.any(by_x)
  assert np.any(by_basis)


@pytest.mark.parametrize("n", [4, 9])
def test_eigenvalues_with_gradients_are_those_without(n):
  """Made from x.T x if there are more tokens than channels, else from x U."""
  mask = prefix([n, n - 1], n)
  x, basis = normal(0, 2, n, 4), orthogonal.cayley(normal(1, 4, 4))
  weights = normal(2, 2, 4), normal(3, 2)

  def plain(x, basis):
    x = jnp.where(mask[..., None], x, 0)
    count = mask.sum(1)

    def diagonal(x):
      return jnp.square(x @ basis).sum(1) / count[:, None]

    values, fixed = diagonal(x), jax.lax.stop_gradient(x)
    gram = jnp.einsum("bni,bnj->bij", fixed, fixed) / count[:, None, None]
    rest = jnp.square(gram).sum((1, 2)) - jnp.square(diagonal(fixed)).sum(1)
    return values / values.max(1, keepdims=True), rest

  def loss(function, x, basis):
    sigma, error = function(x, basis)
    return (weights[0] * sigma).sum() + (weights[1] * error).sum()

  def ours(x, basis):
    return t.eigenvalues(x, basis, mask)

  chex.assert_trees_all_close(ours(x, basis), plain(x, basis), rtol=1e-5)
  expected = jax.value_and_grad(loss, (1, 2))(plain, x, basis)
  found = jax.value_and_grad(loss, (1, 2))(ours, x, basis)
  chex.assert_trees_all_close(found[0], expected[0], rtol=1e-5)
  chex.assert_trees_all_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
  forwards = jax.jacfwd(lambda *args: loss(ours, *args), (0, 1))(x, basis)
  chex.assert_trees_all_close(forwards, expected[1], rtol=1e-4, atol=1e-5)


def test_without_tokens_sigma_is_zero():
  sigma, error = t.eigenvalues(
    normal(0, 1, 3, 4), jnp.eye(4), jnp.zeros((1, 3), bool)
  )
  chex.assert_trees_all_equal((sigma, error), (jnp.zeros((1, 4)), jnp.zeros(1)))


def test_a_sample_without_tokens_leaves_the_gradient_finite():
  mask = prefix([3, 0], 3)

  def loss(basis, s):
    sigma, error = t.eigenvalues(normal(0, 2, 3, 4), basis, mask)
    return jnp.square(sigma + t.learned_sigma(s)).sum() + error.sum()

  grads = jax.grad(loss, (0, 1))(jnp.eye(4), jnp.zeros(4))
  chex.assert_tree_all_finite(grads)


@pytest.mark.parametrize("n", [3, 20])  # Fewer tokens than channels, and more.
@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_the_formula_in_both_orders_of_products(n, shared):
  x, u, v = normal(0, 2, n, 6), normal(1, 3, 6, 6), normal(2, 3, 6, 6)
  sigma = jax.random.uniform(jax.random.key(3), (1 if shared else 2, 6))
  known = t.folded(u, sigma, v) if shared and n == 3 else None
  experts = t.Experts(u, v, jnp.ones(6), jnp.ones(()), known)
  f = t.expert_outputs(x, experts, sigma)
  for e in range(3):
    for b in range(2):
      s = np.diag(np.asarray(sigma[0 if shared else b], np.float64))
      y = np.asarray(x[b], np.float64) @ u[e] @ s @ v[e]
      want = np.where(y > 0, y, np.expm1(np.minimum(y, 0)))
      np.testing.assert_allclose(f[e][b], want, atol=2e-5)


@pytest.mark.parametrize(
  "activations", long_except(("stored",), ("stored", "reversible"))
)
def test_what_is_folded_once_is_what_every_call_folds(activations):
  model = models.build(
    "random_transject",
    vocab_size=30,
    max_len=24,
    num_classes=2,
    d_model=8,
    num_layers=2,
    activations=activations,
  )
  ids = jax.random.randint(jax.random.key(0), (3, 12), 1, 30)
  params = initial.params(model, ids)
  for i in range(2):
    params["encoder"][f"layer_{i}"]["residual"]["alpha"] = jnp.float32(0.7)

  def loss(params, prepare):
    return jnp.square(model.apply(prepare(params), ids, train=False)).sum()

  grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  once = grad(params, lambda p: steps.prepared(p, "cayley"))
  chex.assert_trees_all_close(
    once, grad(params, lambda p: {"params": p}), atol=1e-5
  )
  variables = steps.prepared(params, "cayley")
  assert variables[t.FOLDED]["encoder"].keys() == {"layer_0", "layer_1"}
  known = jax.tree.map(jnp.zeros_like, variables[t.FOLDED])
  other = model.apply(variables | {t.FOLDED: known}, ids, train=False)
  assert jnp.abs(other - model.apply(variables, ids, train=False)).max() > 1e-3


def test_nothing_is_folded_where_samples_have_a_sigma_of_their_own():
  _, params, _ = encoder(2, 3, 0.5)
  assert steps.prepared(params, "cayley")[t.FOLDED] == {}


def test_a_large_batch_makes_no_array_of_d_cubed():
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


def test_the_gate_is_a_convex_combination_of_masked_maxima():
  x, f = normal(0, 2, 5, 4), [normal(i, 2, 5, 4) for i in (1, 2, 3)]
  a, w, mask = jnp.float32(0.3), normal(4, 4), prefix([5, 3], 5)
  weights = t.gate(x, f, a, w, mask)
  np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
  for b, length in enumerate([5, 3]):
    tops = [(x + a * one)[b, :length].max(0) for one in f]
    want = jax.nn.softmax(jnp.stack(tops) @ w)
    np.testing.assert_allclose(weights[b], want, atol=1e-6)


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
    y = y + a * models.blocks.orthogonal_feed_forward(
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


@pytest.mark.parametrize(
  ("num_experts", "paper"), [(1, 6_616_844), (8, 28_679_948)]
)
def test_parameters_are_those_of_table_3a_divided_by_ten(num_experts, paper):
  """The authors' classes less the biases of U, V and eigenvectors and gate."""
  model = models.build(
    "transject",
    vocab_size=185,
    max_len=4096,
    num_classes=2,
    d_model=512,
    num_layers=6,
    mixer={"num_experts": num_experts},
  )
  head = 512 * 2 + 2
  biases = 6 * num_experts * 2 * 512 + 512 + 6
  assert models.size(model) - head == paper - biases


def test_the_eigenvalues_are_made_once_and_carried():
  _, params, _ = encoder(3, 2, 0.5)
  has = [
    "basis_skew" in params["encoder"][f"layer_{i}"]["mixer"] for i in range(3)
  ]
  assert has == [True, False, False]


def test_random_transject_has_one_learned_sigma_and_no_reconstruction():
  model = models.build(
    "random_transject",
    vocab_size=9,
    max_len=9,
    num_classes=2,
    d_model=8,
    num_layers=2,
  )
  ids = jnp.ones((1, 5), jnp.int32)
  variables = model.init(jax.random.key(0), ids, train=False)
  assert "losses" not in variables
  assert variables["params"]["encoder"]["layer_0"]["mixer"]["sigma"].shape == (
    8,
  )


def test_an_unknown_sigma():
  with pytest.raises(ValueError, match="sigma 'noise'.*eigenvalues, learned"):
    encoder(1, 1, 0.5, sigma="noise")


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


def test_the_certified_gate_is_its_formula():
  x, w, mask = normal(0, 2, 5, 4), 3 * normal(1, 3, 4), prefix([5, 3], 5)
  weights = t.certified_gate(x, w, mask)
  for b, length in enumerate([5, 3]):
    tokens = np.asarray(x[b, :length], np.float64)
    h = tokens.mean(0) / np.sqrt(np.square(tokens).sum() / length)
    logits = np.asarray(w, np.float64) @ h
    want = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(weights[b], want, atol=1e-6)
  constant = 1 + np.sqrt(3) * np.linalg.norm(w - w.mean(0)) / 2
  np.testing.assert_allclose(t.certified_constant(w), constant, rtol=1e-6)
  # What the softmax does not see costs nothing.
  np.testing.assert_allclose(t.certified_constant(w[:1]), 1, atol=1e-5)
  chex.assert_trees_all_close(
    weights, t.certified_gate(x, w - w.mean(0), mask), atol=1e-6
  )
  empty = t.certified_gate(0 * x, w, mask & False)
  np.testing.assert_allclose(empty, 1 / 3)
  chex.assert_tree_all_finite(
    jax.grad(lambda w: t.certified_constant(w))(jnp.zeros((3, 4)))
  )


@functools.cache
def certified(num_layers, num_experts):
  """A forward pass from embedded tokens: what they were, and the end."""
  model = build(num_layers, num_experts, 8, sigma="learned", gating="certified")

  def run(params, embedded, ids):
    own = make_variables(model, params)
    found = capturing.capture(model, own, ids, embedded)
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


def test_an_unknown_gating():
  with pytest.raises(ValueError, match="gating 'soft'.*certified.*paper"):
    build(2, 2, 8, gating="soft")


def test_a_stochastic_matrix_can_stretch_by_the_root_of_its_size():
  """Corollary 1 takes eigenvalues; what stretches is the singular value."""
  attention = np.zeros((100, 100))
  attention[:, 0] = 1  # Every token looks at the first.
  assert np.abs(np.linalg.eigvals(attention)).max() == pytest.approx(1)
  assert np.linalg.norm(attention, 2) == pytest.approx(10)


def test_many_activations_are_negative():
  """So the logarithm in the paper's entropy, equation 10, does not exist."""
  model, params, ids = encoder(2, 2, 0.5, d=32)
  for x in hidden(model, params, ids):
    assert 0.25 < np.mean(np.asarray(x) < 0) < 0.6
