import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

from jaxformers.analysis.tokens import smoothness as s


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def weights(seed, n, symmetric=False):
  k = normal(seed, n, 4)
  q = k if symmetric else normal(seed + 1, n, 4)
  return jnp.exp(q @ k.T / 2)


def rows(w):
  return w / w.sum(-1, keepdims=True)


@pytest.mark.slow
def test_cosine_similarity_is_the_mean_over_all_pairs_of_tokens():
  x = normal(0, 3, 7, 5).at[0, 2].set(0)
  mask = jnp.arange(7)[None] < jnp.array([[7], [4], [1]])
  similarity = s.cosine_similarity(x, mask)
  for b, n in enumerate([7, 4]):
    unit = np.asarray(x[b, :n])
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-99)
    cosines = (unit @ unit.T)[~np.eye(n, dtype=bool)]
    np.testing.assert_allclose(similarity[b], cosines.mean(), atol=1e-12)
  assert np.isnan(similarity[2])
  alike = jnp.broadcast_to(normal(1, 1, 1, 5), (1, 6, 5))
  of_equals = s.cosine_similarity(alike, jnp.ones((1, 6), bool))
  np.testing.assert_allclose(of_equals, 1, atol=1e-12)


@pytest.mark.parametrize("symmetric", [False, True])
def test_functional_and_gradient_match_autodiff(symmetric):
  v, w = normal(0, 6, 3), weights(1, 6, symmetric)
  far = np.square(np.asarray(v)[:, None] - np.asarray(v)[None]).sum(-1)
  np.testing.assert_allclose(
    s.functional(v, w), (far * np.asarray(w)).sum() / 2, rtol=1e-12
  )
  h, direction = 1e-6, normal(5, 6, 3)
  difference = s.functional(v + h * direction, w) - s.functional(
    v - h * direction, w
  )
  slope = jnp.vdot(s.gradient(v, w), direction)
  np.testing.assert_allclose(slope, difference / (2 * h), rtol=1e-8)
  np.testing.assert_allclose(
    s.gradient(v, w), jax.grad(s.functional)(v, w), atol=1e-10
  )


def test_step_is_symmetric_attention_plus_fidelity():
  v, first, k = normal(0, 6, 3), normal(1, 6, 3), normal(2, 6, 4)
  mask = jnp.ones(6, bool)
  attention = s.attention_weights(k, k, mask) @ v
  w = jnp.exp(k @ k.T / 2)
  np.testing.assert_allclose(s.step(v, w), attention, atol=1e-12)
  np.testing.assert_allclose(
    s.step(v, w, 0.6, first), attention + 0.6 * (first - v), atol=1e-12
  )
  # And as gradient descent, each token at its own step size.
  both = w + w.T
  want = v - s.gradient(v, w) / both.sum(-1, keepdims=True)
  np.testing.assert_allclose(s.step(v, w), want, atol=1e-12)


def test_step_lowers_the_functional():
  for seed in range(20):
    v, w = normal(seed, 8, 3), weights(seed, 8)
    assert s.functional(s.step(v, w), w) < s.functional(v, w)


def test_stationary_is_the_limit_of_repeated_attention():
  k, v = normal(0, 7, 4), normal(1, 7, 3)
  scores = k @ k.T / 2
  a, pi = rows(jnp.exp(scores)), s.stationary(scores)
  np.testing.assert_allclose(pi @ a, pi, atol=1e-12)
  np.testing.assert_allclose(pi.sum(), 1, atol=1e-12)
  u = jnp.linalg.matrix_power(a, 400) @ v
  np.testing.assert_allclose(u, jnp.broadcast_to(pi @ v, u.shape), atol=1e-10)


@pytest.mark.parametrize(("fidelity", "converges"), [(0.6, True), (1.2, False)])
def test_limit_with_fidelity_is_not_constant_or_diverges(fidelity, converges):
  a, first = rows(weights(0, 7, symmetric=True)), normal(1, 7, 3)
  u = first
  for _ in range(400):
    u = a @ u + fidelity * (first - u)
  if not converges:
    assert float(jnp.abs(u).max()) > 1e6
    return
  np.testing.assert_allclose(u, s.limit(a, fidelity, first), atol=1e-10)
  assert float(u.std(0).min()) > 0.1


@pytest.mark.parametrize("fidelity", [0.0, 0.4])
@pytest.mark.long
def test_flow_is_the_integral_of_the_gradient(fidelity):
  u, first, w = normal(0, 6, 3), normal(1, 6, 3), weights(2, 6)

  def slope(_, flat):
    now = jnp.asarray(flat).reshape(6, 3)
    return np.ravel(-s.gradient(now, w) + fidelity * (first - now))

  solved = scipy.integrate.solve_ivp(
    slope, (0, 0.3), np.ravel(u), rtol=1e-11, atol=1e-11
  ).y[:, -1]
  options = {"fidelity": fidelity, "first": first} if fidelity else {}
  np.testing.assert_allclose(
    s.flow(u, w, 0.3, **options), solved.reshape(6, 3), atol=1e-8
  )
  np.testing.assert_allclose(s.flow(u, w, 0.0, **options), u, atol=1e-12)
  end = s.flow(u, w, 1e6, **options)
  want = -s.gradient(end, w) + fidelity * (first - end)
  np.testing.assert_allclose(want, 0, atol=1e-10)
  constant = jnp.ptp(end, axis=0).max() < 1e-8
  assert constant == (fidelity == 0)


def test_flow_refuses_fidelity_without_first_values():
  with pytest.raises(ValueError, match="fidelity=0.4.*`first`"):
    s.flow(normal(0, 6, 3), weights(2, 6), 1.0, 0.4)


def test_flow_never_raises_the_functional():
  u, first, w = normal(0, 6, 3), normal(1, 6, 3), weights(2, 6)

  def energy(u):
    return s.functional(u, w) + 0.4 / 2 * jnp.square(u - first).sum()

  times = jnp.linspace(0, 1, 30)
  along = [float(energy(s.flow(u, w, t, 0.4, first))) for t in times]
  assert (np.diff(along) < 1e-12).all()
  assert along[-1] < along[0] / 2
  # All times at once.
  many = s.flow(jnp.stack([u] * 30), jnp.stack([w] * 30), times, 0.4, first)
  np.testing.assert_allclose(many[7], s.flow(u, w, times[7], 0.4, first))


def test_attention_weights_of_causal_tokens_equal_those_of_prefixes():
  q, k = normal(0, 5, 4), normal(1, 5, 4)
  causal_weights = s.attention_weights(q, k, jnp.ones(5, bool), causal=True)
  np.testing.assert_allclose(causal_weights, np.tril(causal_weights), atol=0)
  want = s.attention_weights(q[:3], k[:3], jnp.ones(3, bool))[2]
  np.testing.assert_allclose(causal_weights[2, :3], want, atol=1e-12)


def test_gradient_cosine_is_the_mean_cosine_of_gradients():
  v, a = normal(0, 6, 3), rows(weights(1, 6))
  mask = jnp.ones(6, bool)
  np.testing.assert_allclose(s.gradient_cosine(v, a, a, mask), 1, atol=1e-12)
  other = 2 * jnp.eye(6) - a  # The opposite slope.
  np.testing.assert_allclose(
    s.gradient_cosine(v, a, other, mask), -1, atol=1e-12
  )
  # Of some tokens alone.
  mixed = jnp.where(jnp.arange(6)[:, None] < 2, other, a)
  cosine = s.gradient_cosine(v, a, mixed, jnp.arange(6) < 3)
  np.testing.assert_allclose(cosine, -1 / 3, atol=1e-12)


def long_keys(length):
  """q, k, v [197, 64] in float64, keys and queries of a length."""
  q, k, v = (normal(seed, 197, 64) for seed in range(3))
  return *(
    length * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)
  ), v


def plain_cosine(q, k, v, causal=False):
  """The definition, pair by pair, in float64."""
  far = np.asarray(v)[:, None] - np.asarray(v)[None]
  slopes = []
  for x in (q, k):
    scores = np.array(x @ k.T / k.shape[-1] ** 0.5)
    np.fill_diagonal(scores, -np.inf)
    if causal:
      scores[np.triu_indices(len(scores), 1)] = -np.inf
    top = scores.max(1, keepdims=True)
    w = np.exp(scores - np.where(np.isfinite(top), top, 0))
    slope = np.einsum("nm,nme->ne", w, far)[int(causal) :]
    slopes.append(slope / np.linalg.norm(slope, axis=1, keepdims=True))
  return (slopes[0] * slopes[1]).sum(1).mean()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 16, 20, 40])
@pytest.mark.slow
def test_gradient_cosine_is_exact_for_nearly_diagonal_weights(length, causal):
  """In float32, where almost all of a row's weight is on the diagonal."""
  q, k, v = long_keys(length)
  q = k + 0.1 * q
  want = plain_cosine(q, k, v, causal)
  with jax.enable_x64(False):
    q, k, v = (jnp.asarray(np.float32(x)) for x in (q, k, v))
    mask = jnp.ones(197, bool)
    a, b = (
      s.attention_weights(x, k, mask, causal, diagonal=False) for x in (q, k)
    )
    cosine = s.gradient_cosine(v, a, b, mask)
    np.testing.assert_allclose(cosine, want, atol=1e-4)
    np.testing.assert_allclose(s.gradient_cosine(v, b, b, mask), 1, atol=1e-6)
    if length <= 20:  # Farther apart, weights beside the diagonal underflow.
      a, b = (s.attention_weights(x, k, mask, causal) for x in (q, k))
      cosine = s.gradient_cosine(v, a, b, mask)
      np.testing.assert_allclose(cosine, want, atol=1e-4)


@pytest.mark.parametrize("spread", [1e-2, 1e-4])
def test_gradient_cosine_is_exact_for_nearly_equal_tokens(spread):
  """In float32, beside what all of them share."""
  q, k, noise = long_keys(4)
  v = jnp.asarray(np.float32(normal(3, 1, 64) + spread * noise), float)
  a = s.attention_weights(q, k, jnp.ones(197, bool))
  far = np.square(np.asarray(v)[:, None] - np.asarray(v)[None]).sum(-1)
  want = (far * np.asarray(a)).sum() / 2
  cosine = plain_cosine(q, k, v)
  with jax.enable_x64(False):
    q, k, v, a = (jnp.asarray(np.float32(x)) for x in (q, k, v, a))
    np.testing.assert_allclose(s.functional(v, a), want, rtol=1e-4)
    mask = jnp.ones(197, bool)
    a, b = (s.attention_weights(x, k, mask) for x in (q, k))
    measured = s.gradient_cosine(v, a, b, mask)
    np.testing.assert_allclose(measured, cosine, atol=1e-4)


def test_gradient_cosine_leaves_out_zero_gradients():
  v, w = normal(0, 5, 3), rows(weights(1, 5))
  nothing = w.at[0].set(0)
  mask = jnp.ones(5, bool)
  np.testing.assert_allclose(
    s.gradient_cosine(v, w, nothing, mask), 1, atol=1e-12
  )
  assert np.isnan(s.gradient_cosine(v, w, jnp.eye(5), mask))


@pytest.mark.parametrize("length", [1, 20, 27, 60])
@pytest.mark.slow
def test_log_functional_kernel_of_long_keys_does_not_overflow(length):
  _, k, v = long_keys(length)
  mask = jnp.arange(197) < 150
  want = s.log_functional_kernel(v, k, mask)
  scores = np.longdouble(np.asarray(k @ k.T)) / 8
  far = np.square(np.asarray(v)[:, None] - np.asarray(v)[None]).sum(-1)
  w = np.exp(scores[:150, :150])
  exact = np.log((w * far[:150, :150]).sum() / 2 / 150**2)
  np.testing.assert_allclose(want, float(exact), rtol=1e-12)
  with jax.enable_x64(False):
    k, v = (jnp.asarray(np.float32(x)) for x in (k, v))
    logs = s.log_functional_kernel(v, k, mask)
  np.testing.assert_allclose(logs, want, rtol=1e-5)
  alone = s.log_functional_kernel(v, k, jnp.arange(197) < 1)
  assert alone == -np.inf


def test_head_redundancy_is_the_mean_similarity_of_maps():
  w = jnp.stack([rows(weights(i, 5)) for i in range(2)])
  np.testing.assert_allclose(s.head_redundancy(w, 3 * w), 1, atol=1e-12)
  want = (w[0] * w[1]).sum() / (jnp.linalg.norm(w[0]) * jnp.linalg.norm(w[1]))
  np.testing.assert_allclose(s.head_redundancy(w, w[::-1]), want, atol=1e-12)


@pytest.mark.slow
def test_attention_weights_of_padding_are_zero():
  q, k = normal(0, 2, 5, 4), normal(1, 2, 5, 4)
  mask = jnp.arange(5)[None] < jnp.array([[5], [3]])
  w = s.attention_weights(q, k, mask)
  np.testing.assert_allclose(w.sum(-1), 1, atol=1e-12)
  assert not w[1, :, 3:].any()
  want = jax.nn.softmax(q[1] @ k[1, :3].T / 2, -1)
  np.testing.assert_allclose(w[1, :, :3], want, atol=1e-12)


def samples():
  """Tokens [2, 6, 4] and a mask; the second sample has a hole and padding."""
  mask = np.ones((2, 6), bool)
  mask[1, 0] = mask[1, 2] = mask[1, 5] = False
  return np.asarray(normal(4, 2, 6, 4)) + 1, mask


def test_measures_of_tokens_are_their_formulas():
  x, mask = samples()
  found = [s.residual(x, mask), *s.ranks(x, mask), s.massive(x, mask)]
  for b in range(2):
    tokens = x[b, mask[b]]
    rest = np.linalg.norm(tokens - tokens.mean(0)) / np.linalg.norm(tokens)
    values = np.linalg.svd(tokens - tokens.mean(0), compute_uv=False)
    p = np.maximum(values / values.sum(), 1e-300)
    stable = np.square(values).sum() / values[0] ** 2
    effective = np.exp(-(p * np.log(p)).sum())
    peak = np.abs(tokens).max() / np.median(np.abs(tokens))
    want = [rest, stable, effective, peak]
    np.testing.assert_allclose([f[b] for f in found], want, atol=1e-10)


def test_residual_is_one_minus_the_cosine_and_ranks_do_not_see_the_mean():
  x, mask = samples()
  unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  count = mask.sum(1)
  # The mean cosine of all pairs, each token with itself included.
  cosine = s.cosine_similarity(unit, mask)
  cosine = (cosine * (count - 1) + 1) / count
  np.testing.assert_allclose(
    jnp.square(s.residual(unit, mask)), 1 - cosine, atol=1e-10
  )
  far = 1e3 + x
  assert s.cosine_similarity(far, mask).min() > 0.999
  assert s.residual(far, mask).max() < 0.01
  for a, b in zip(s.ranks(x, mask), s.ranks(far, mask), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8)


@pytest.mark.parametrize("value", [1.0, 0.1])
def test_equal_tokens_have_no_rank_and_no_residual(value):
  # The sum of seven numbers 0.1 is no multiple of 0.1 in float32.
  x = jnp.full((1, 7, 3), value, jnp.float32)
  mask = jnp.ones((1, 7), bool)
  stable, effective = s.ranks(x, mask)
  np.testing.assert_allclose(s.residual(x, mask), 0, atol=1e-12)
  np.testing.assert_allclose(stable, 0, atol=1e-12)
  np.testing.assert_allclose(effective, 1, atol=1e-6)


def test_measures_of_weights_are_their_formulas():
  _, mask = samples()
  seen = mask[:, None] & np.tri(6, dtype=bool)
  scores = np.where(seen, np.exp(np.asarray(normal(5, 2, 6, 6))), 0)
  w = scores / np.maximum(scores.sum(-1, keepdims=True) + 0.3, 1e-9)
  found = s.of_weights(jnp.asarray(w), jnp.asarray(mask))
  for b in range(2):
    kept = w[b][np.ix_(mask[b], mask[b])]
    p = kept / kept.sum(-1, keepdims=True)
    values = np.linalg.svd(kept, compute_uv=False)
    logs = np.log(np.where(p > 0, p, 1))
    want = {
      "first": kept[:, 0].mean(),
      "missing": 1 - kept.sum(-1).mean(),
      "column": kept.sum(0).max(),
      "entropy": -(p * logs).sum(-1).mean(),
      "second": values[1] / values[0],
    }
    for name, value in want.items():
      np.testing.assert_allclose(found[name][b], value, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1, 3])
def test_second_singular_value_agrees_with_a_decomposition(scale, causal):
  mask = np.ones((2, 160), bool)
  seen = s.seen_keys(jnp.asarray(mask), causal)
  w = s.weigh(scale * normal(7, 2, 160, 160), seen)
  want = np.linalg.svd(np.asarray(w), compute_uv=False)
  found = s.of_weights(w, jnp.asarray(mask))["second"]
  # Subspace iteration finds a space that holds nearly all of each vector.
  np.testing.assert_allclose(found, want[:, 1] / want[:, 0], rtol=1e-3)


def test_second_singular_value_of_extreme_weights():
  cases = [
    (want, weights)
    for n in (40, 140)
    for want, weights in (
      (1, np.eye(n)),
      (0, np.full((n, n), 1 / n)),
      (0, np.zeros((n, n))),
    )
  ]
  for want, weights in [*cases, (0, np.ones((1, 1)))]:
    mask = jnp.ones((1, len(weights)), bool)
    found = s.of_weights(jnp.asarray(weights)[None], mask)["second"]
    np.testing.assert_allclose(found, want, atol=1e-7)
