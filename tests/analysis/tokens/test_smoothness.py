import csv
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

from jaxformers import models, trained
from jaxformers.analysis.tokens import smoothness as s
from jaxformers.analysis.tokens.capture import Capture, capture
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.marks import long_except


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
def test_similarity_is_the_mean_cosine_of_all_pairs_of_tokens():
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
def test_the_functional_and_its_gradient(symmetric):
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


def test_an_euler_step_is_symmetric_attention_and_the_term():
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


def test_steps_make_tokens_smoother():
  for seed in range(20):
    v, w = normal(seed, 8, 3), weights(seed, 8)
    assert s.functional(s.step(v, w), w) < s.functional(v, w)


def test_attention_applied_again_and_again_forgets_the_tokens():
  k, v = normal(0, 7, 4), normal(1, 7, 3)
  scores = k @ k.T / 2
  a, pi = rows(jnp.exp(scores)), s.stationary(scores)
  np.testing.assert_allclose(pi @ a, pi, atol=1e-12)
  np.testing.assert_allclose(pi.sum(), 1, atol=1e-12)
  u = jnp.linalg.matrix_power(a, 400) @ v
  np.testing.assert_allclose(u, jnp.broadcast_to(pi @ v, u.shape), atol=1e-10)


@pytest.mark.parametrize(("fidelity", "converges"), [(0.6, True), (1.2, False)])
def test_with_the_term_it_does_not_become_constant_or_it_diverges(
  fidelity, converges
):
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
@pytest.mark.slow
def test_the_flow_is_the_integral_of_the_gradient(fidelity):
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


def test_a_fidelity_is_to_something():
  with pytest.raises(ValueError, match=r"fidelity=0.4 .*: give `first`"):
    s.flow(normal(0, 6, 3), weights(2, 6), 1.0, 0.4)


def test_energy_never_rises_along_the_flow():
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


def test_a_causal_token_is_like_those_before_it():
  q, k = normal(0, 5, 4), normal(1, 5, 4)
  causal_weights = s.attention_weights(q, k, jnp.ones(5, bool), causal=True)
  np.testing.assert_allclose(causal_weights, np.tril(causal_weights), atol=0)
  want = s.attention_weights(q[:3], k[:3], jnp.ones(3, bool))[2]
  np.testing.assert_allclose(causal_weights[2, :3], want, atol=1e-12)


def test_the_cosine_of_gradients():
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
def test_slopes_of_tokens_that_attend_to_themselves(length, causal):
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
def test_tokens_that_are_nearly_alike(spread):
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


def test_tokens_without_a_slope_are_left_out():
  v, w = normal(0, 5, 3), rows(weights(1, 5))
  nothing = w.at[0].set(0)
  mask = jnp.ones(5, bool)
  np.testing.assert_allclose(
    s.gradient_cosine(v, w, nothing, mask), 1, atol=1e-12
  )
  assert np.isnan(s.gradient_cosine(v, w, jnp.eye(5), mask))


@pytest.mark.parametrize("length", [1, 20, 27, 60])
@pytest.mark.slow
def test_the_functional_of_long_keys_does_not_overflow(length):
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


def test_redundancy_of_heads():
  w = jnp.stack([rows(weights(i, 5)) for i in range(2)])
  np.testing.assert_allclose(s.head_redundancy(w, 3 * w), 1, atol=1e-12)
  want = (w[0] * w[1]).sum() / (jnp.linalg.norm(w[0]) * jnp.linalg.norm(w[1]))
  np.testing.assert_allclose(s.head_redundancy(w, w[::-1]), want, atol=1e-12)


def test_weights_leave_padding_out():
  q, k = normal(0, 2, 5, 4), normal(1, 2, 5, 4)
  mask = jnp.arange(5)[None] < jnp.array([[5], [3]])
  w = s.attention_weights(q, k, mask)
  np.testing.assert_allclose(w.sum(-1), 1, atol=1e-12)
  assert not w[1, :, 3:].any()
  want = jax.nn.softmax(q[1] @ k[1, :3].T / 2, -1)
  np.testing.assert_allclose(w[1, :, :3], want, atol=1e-12)


def build(name, **options):
  model = models.build(
    name,
    vocab_size=20,
    max_len=9,
    num_classes=3,
    num_layers=3,
    **{"d_model": 8, **options},
  )
  ids = draws.integers(0, (3, 9), 1, 20, end=6)
  return model, initial.params(model, ids, seed=1), np.asarray(ids)


@pytest.mark.parametrize(
  "name",
  long_except(("isometric", "mega"), sorted(models.MODELS)),
)
@pytest.mark.slow
def test_every_encoder_has_curves(name):
  with jax.enable_x64(False):
    model, params, ids = build(name, d_model=16)
    measured = s.measure_curves(model, params, ids)
  assert len(measured["similarity"]) == 4
  assert np.isfinite(measured["similarity"]).all()


@pytest.mark.slow
def test_curves_of_a_model():
  with jax.enable_x64(False):
    model, params, ids = build("neutreno", mixer={"num_heads": 2})
    measured = s.measure_curves(model, params, ids, batch_size=2)
    assert set(measured) == set(s.CURVES)
    lengths = [len(measured[name]) for name in s.CURVES]
    assert lengths == [4, 3, 3, 3, 2]
    seen = capture(model, make_variables(model, params), jnp.asarray(ids))
  for k, x in enumerate(seen.hidden):
    alike = [
      s.cosine_similarity(x[b : b + 1, :n], jnp.ones((1, n), bool))[0]
      for b, n in enumerate([9, 6, 9])
    ]
    np.testing.assert_allclose(
      measured["similarity"][k], np.mean(alike), rtol=1e-4
    )
  k, v = (seen.heads[1][x][1, :, :6] for x in ("key", "value"))
  single = s.measure_curves(model, params, ids[1:2])
  w = s.attention_weights(k, k, jnp.ones((2, 6), bool))
  want = s.functional(v, w / 6).mean()
  np.testing.assert_allclose(single["functional"][1], want, rtol=1e-4)
  logs = s.log_functional_kernel(v, k, jnp.ones((2, 6), bool))
  want = np.log10(np.exp(logs).mean())
  np.testing.assert_allclose(single["functional_kernel"][1], want, rtol=1e-4)


def test_maps_have_the_numbers_of_their_layers():
  """Also where a layer before them has no keys."""
  k = normal(0, 2, 3, 4, 5)
  mask = jnp.ones((2, 4), bool)
  heads = ({}, {"key": k}, {"key": k, "query": 2 * k})
  maps = s.maps(Capture((), mask, None, None, heads))
  assert [*maps] == [2, 3]
  with jax.enable_x64(False):
    k = jnp.asarray(k[:1], jnp.float32)
    for layer, q in ((2, k), (3, 2 * k)):
      want = s.attention_weights(q, k, mask[:1, None])[0]
      np.testing.assert_allclose(maps[layer], want, rtol=1e-4)


def test_batches_are_averaged_by_their_samples():
  values, counts = np.array([[1.0, 3.0], [4.0, 0.0]]), np.array([2, 1])
  np.testing.assert_allclose(s._average("functional", values, counts), [2, 2])
  logs = s._average("functional_kernel", np.log10(values + 1), counts)
  np.testing.assert_allclose(10**logs, [3, 3])
  huge = s._average("functional_kernel", 400 + np.log10(values + 1), counts)
  np.testing.assert_allclose(huge, 400 + np.log10([3, 3]))


def test_models_without_heads_have_a_similarity():
  with jax.enable_x64(False):
    assert set(s.measure_curves(*build("transject"))) == {"similarity"}


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path, capsys):
  loaded = trained.load

  def load(workdir, **_):
    if "nothing" in str(workdir):
      return loaded(workdir)
    name = workdir.parent.name if "seed" in workdir.name else workdir.name
    options = {} if name == "transject" else {"mixer": {"num_heads": 2}}
    model, params, ids = build(name, **options)
    if workdir.name == "seed_1":
      params = jax.tree.map(lambda leaf: 2 * leaf, params)
    return types.SimpleNamespace(
      model=model, params=params, sample=lambda count, length, split: ids
    )

  monkeypatch.setattr(trained, "load", load)
  with jax.enable_x64(False):
    seeded = tmp_path / "symmetric_transformer"
    for k in range(2):
      (seeded / f"seed_{k}").mkdir(parents=True)
    runs = [str(seeded), "transject"]
    out = tmp_path / "report" / "alike"
    s.main([*runs, "--samples=4", "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("layer (0: embedding)") == len(runs)
    # What was read: neither --samples nor --length, which are more.
    assert "3 test samples of at most 9 tokens, 1 to 2 seeds;" in printed
    assert "J = 1/2 sum_ij" in printed
    assert "mean cosine of two tokens " in printed
    table = out.with_suffix(".csv").read_text()
    rows = list(csv.reader(table.splitlines()))[1:]
    assert list(dict.fromkeys(row[0] for row in rows)) == runs

    def values(run, seed, name):
      return {
        int(row[3]): float(row[4])
        for row in rows
        if row[:3] == [run, str(seed), name]
      }

    assert list(values(runs[0], 1, "similarity")) == [0, 1, 2, 3]
    assert list(values(runs[0], 0, "functional")) == [1, 2, 3]
    assert list(values(runs[0], 0, "head_redundancy")) == [2, 3]
    alike = values(runs[0], 1, "gradient_cosine")
    assert list(alike.values()) == pytest.approx([1] * 3)
    assert values(runs[0], 0, "functional") != values(runs[0], 1, "functional")
    assert not values("transject", 1, "similarity")
    first, second = (values(runs[0], k, "functional")[2] for k in (0, 1))
    line = printed[printed.index("J of the values, per token") :].split("\n")
    assert line[0].split()[-2] == f"{(first + second) / 2:.4g}"
    assert line[1].split()[-2] == f"{abs(first - second) / 2**0.5:.2g}"
    for suffix in (".png", ".svg"):
      assert out.with_suffix(suffix).stat().st_size > 5_000
    with pytest.raises(SystemExit, match="There is no run in"):
      s.main([str(tmp_path / "nothing")])


def test_the_text_is_a_table_with_a_column_for_each_layer():
  table_rows = []
  for seed in (0, 1):
    curves = {  # Not in the order of the panels.
      "functional": [1234.5 + seed, 2.0],
      "head_redundancy": [0.5],
      "similarity": [0.1, 0.25, 0.123456],
    }
    table_rows += s.rows("run", seed, curves)
  _, run, head, *lines = s.text(table_rows).split("\n")
  assert run == "run"
  assert head.split()[-3:] == ["0", "1", "2"]
  assert {len(line) for line in lines} == {len(head)}
  cells = [line.split()[-3:] for line in lines]
  assert cells == [
    ["0.1", "0.25", "0.1235"],
    ["0", "0", "0"],
    ["-", "1235", "2"],
    ["-", "0.71", "0"],
    ["-", "-", "0.5"],
    ["-", "-", "0"],
  ]
  # One seed has no deviation.
  assert "+-" not in s.text(table_rows[: len(table_rows) // 2])


def test_the_figure_says_what_j_is():
  table_rows = s.rows("run", 0, {"similarity": [0.1, 0.2], "functional": [3.0]})
  caption = s.figure(table_rows, "8 test samples").caption
  assert caption.startswith("8 test samples; ")
  assert "J = 1/2 sum_ij w_ij |v_i - v_j|^2" in caption
  assert "NeuTRENO, equation 6" in caption


@pytest.mark.slow
def test_a_sample_of_one_token_is_no_hole_in_the_curve():
  model, params, ids = build("transformer", mixer={"num_heads": 2})
  with jax.enable_x64(False):
    ids = np.array(ids)[:3]
    short = np.zeros_like(ids[:1])
    short[0, 0] = ids[0, 0]
    want = s.measure_curves(model, params, ids)
    ids = np.concatenate([ids, short])
    for batch_size in (3, 4):
      measured = s.measure_curves(model, params, ids, batch_size)
      for name in s.NEEDS_PAIRS:
        np.testing.assert_allclose(measured[name], want[name], rtol=1e-5)


@pytest.mark.parametrize("causal", long_except([True], [False, True]))
@pytest.mark.slow
def test_a_causal_classifier_has_the_curves_of_its_mixer(causal):
  """Its objective does not predict the next token."""
  mixer = {"num_heads": 2, "causal": causal}
  model, params, ids = build("transformer", mixer=mixer)
  with jax.enable_x64(False):
    measured = s.measure_curves(model, params, ids[:2])
    captured = capture(model, make_variables(model, params), ids[:2])
    for name, values in s.curves(captured, causal).items():
      np.testing.assert_allclose(measured[name], values, rtol=1e-4)
    other = s.curves(captured, not causal)
  difference = np.array(measured["functional"]) - other["functional"]
  assert abs(difference).max() > 1e-4
