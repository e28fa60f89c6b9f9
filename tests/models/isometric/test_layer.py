"""Isometric layers: formula, inverse, certificate, and searches against it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import orthogonal
from jaxformers.analysis.certificates.ascent import ascend
from jaxformers.models.blocks import invertible
from jaxformers.models.isometric import layer as iso
from jaxformers.models.isometric.ring import ring_filter
from jaxformers.models.mixers.allpass import Sections
from tests.assertions import assert_between
from tests.marks import long_except

WIDTH, LENGTH = 8, 7
KINDS = [(form, a) for form in iso.FORMS for a in iso.BOUNDS]


def layers(form="pointwise", a="wide", num_layers=3):
  dtype = jnp.zeros(()).dtype  # float64 where it is enabled.
  return iso.IsometricLayers(
    num_layers, form, a, 0.9, (1, 3), LENGTH, "cayley", dtype
  )


def weights(of, seed=0, r=1.5):
  """Weights of one layer, with an a near its greatest."""
  rng = np.random.default_rng(seed)
  dtype = jnp.result_type(float)

  def draw(*shape):
    return rng.normal(size=shape).astype(dtype)

  is_pointwise = of.form == "pointwise"
  count = 1 if is_pointwise else 2
  first, second = (cayley(draw(2, WIDTH, WIDTH)) for _ in range(2))
  return iso.Weights(
    first,
    Sections(draw(2, WIDTH // 2) - 1, draw(2, WIDTH // 2)),
    jax.jit(of.strength)(np.asarray(r, dtype)),
    draw(count, WIDTH),
    None if is_pointwise else second,
  )


cayley = jax.jit(orthogonal.cayley)


@functools.cache
def compiled(of, name="forward"):
  """A function of layers as one program: operations compile one by one."""
  if name == "undo":
    return jax.jit(functools.partial(invertible.inverse, of))
  if name == "do":
    return jax.jit(functools.partial(invertible.forward, of))
  return jax.jit(getattr(of, name))


def tokens(seed=0, n=LENGTH):
  return np.random.default_rng(seed).normal(size=(2, n, WIDTH))


MASK = np.arange(LENGTH)[None] < np.array([[LENGTH], [5]])
HOLES = MASK & (np.arange(LENGTH) != 2)[None]


@pytest.mark.parametrize("form", iso.FORMS)
def test_isometric_layer_is_its_formula(form):
  with jax.enable_x64(True):
    of = layers(form)
    w, x = weights(of), tokens()
    y, side = compiled(of)(w, x, None, MASK)
    first, second = np.asarray(w.mixing)
    ring = jax.jit(ring_filter, static_argnums=3)
    mixed = np.asarray(ring(x @ first, w.sections, MASK, (1, 3))) @ second
    if form == "pointwise":
      want = np.where(mixed + w.bias > 0, 1 + w.a, 1 - w.a) * (mixed + w.bias)
    else:
      hidden = mixed
      for matrix, bias in zip(np.asarray(w.feed_forward), w.bias, strict=True):
        hidden = hidden @ matrix + bias
        hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0)))
      want = mixed + w.a * hidden
  assert side is None
  chex.assert_trees_all_close(np.asarray(y), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_layers", [1, 2, 24])
def test_strength_has_the_lipschitz_budget_of_transject(num_layers):
  """(1 - alpha / L)^2 below, and no more than (1 + alpha / L)^2 above."""
  for r in (0.0, 0.3, -2.0, 50.0):
    a = float(iso.strength(jnp.float32(r), num_layers, "budget", 0.9))
    alpha = abs(np.tanh(r)) * (1 - 1e-6)
    chex.assert_trees_all_close(
      1 - a, (1 - alpha / num_layers) ** 2, rtol=0, atol=2e-6
    )
    assert_between(1 + a, 1, (1 + alpha / num_layers) ** 2, atol=1e-6)
    assert 0 <= a < 1
    wide = float(iso.strength(jnp.float32(r), num_layers, "wide", 0.9))
    chex.assert_trees_all_close(wide, 0.9 * alpha, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("form", "a"), KINDS)
@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)]
)
def test_isometric_layer_is_undone(form, a, dtype, tolerance):
  """Relative to the norm of a sequence; a = 0.9 amplifies rounding tenfold."""
  with jax.enable_x64(dtype == np.float64):
    of = layers(form, a)
    w = weights(of)
    for mask in (MASK, HOLES, np.ones_like(MASK), np.zeros_like(MASK)):
      x = np.where(mask[..., None], tokens(), 0).astype(dtype)
      y, side = compiled(of, "do")(w, x, None, mask)
      back = compiled(of, "undo")(w, y, None, mask, side)
      off = np.where(mask[..., None], np.asarray(back) - x, 0)
      limit = tolerance / (1 - float(w.a)) * (np.linalg.norm(x) + 1e-30)
      assert_between(np.linalg.norm(off), 0, limit)
      assert back.dtype == dtype


@pytest.mark.parametrize(("form", "a"), KINDS)
def test_jacobians_have_singular_values_inside_the_certificate(form, a):
  with jax.enable_x64(True):
    of = layers(form, a)

    def flat(x, w):
      x = x.reshape(1, LENGTH, WIDTH)
      mask = np.ones((1, LENGTH), bool)
      return of.forward(w, x, None, mask)[0].ravel()

    jacobian_of = jax.jit(lambda w, x: jax.jacrev(flat)(x, w))
    for seed in range(3):
      w = weights(of, seed)
      low, high = of.certificate(w, None, 1.0)["sequences"]
      jacobian = jacobian_of(w, tokens(seed)[0].ravel())
      values = np.linalg.svd(jacobian, compute_uv=False)
      assert_between(values, low, high, rtol=1e-12)
      # The bounds are not idle: some direction comes near to each.
      assert values[0] > 1 + 0.5 * (high - 1)
      assert values[-1] < 1 - 0.5 * (1 - low)


def test_both_bounds_are_attained():
  """By two sequences that the filters send to positive, or negative, ones."""
  with jax.enable_x64(True):
    of = layers()
    w = weights(of)
    low, high = of.certificate(w, None, 1.0)["sequences"]
    for sign, bound in ((1, high), (-1, low)):
      ends = [sign * (5 + np.abs(tokens(seed))) for seed in (0, 1)]
      x = [
        jax.jit(of.mix, static_argnames="inverse")(
          w, end - w.bias, MASK | True, inverse=True
        )
        for end in ends
      ]
      y = [compiled(of)(w, end, None, MASK | True)[0] for end in x]
      ratio = np.linalg.norm(y[0] - y[1]) / np.linalg.norm(x[0] - x[1])
      chex.assert_trees_all_close(ratio, bound, rtol=1e-9)


@pytest.mark.parametrize("kind", long_except(KINDS[1:2], KINDS))
@pytest.mark.slow
def test_ascent_finds_no_two_sequences_outside_the_certificate(kind):
  """Three layers, any two sequences under a mask with a hole."""
  of = layers(*kind)
  stack = [weights(of, seed) for seed in range(3)]
  low, high = np.prod(
    [of.certificate(w, None, 1.0)["sequences"] for w in stack], 0
  )

  def ratio(points):
    ends = points["middle"] + points["step"], points["middle"]
    before = after = ends
    for w in stack:
      after = [of.forward(w, x, None, HOLES)[0] for x in after]

    def distance(pair):
      difference = jnp.where(HOLES[..., None], pair[0] - pair[1], 0)
      return jnp.sqrt(jnp.square(difference).sum((1, 2)))

    return distance(after) / distance(before)

  start = {"middle": jnp.float32(tokens(0)), "step": jnp.float32(tokens(1))}
  run = jax.jit(functools.partial(ascend, ratio, steps=150))
  least, greatest = (run(start, sign=sign) for sign in (-1.0, 1.0))
  assert_between((least, greatest), low, high, rtol=1e-5)
  # The search comes near: a fifth of the way is left at the most.
  assert greatest.max() > high**0.8
  assert least.min() < low**0.5


@given(a=st.floats(0, 0.99), u=st.floats(-1e3, 1e3))
def test_unfold_undoes_fold(a, u):
  y = iso.fold(np.float64(u), np.float64(a))
  chex.assert_trees_all_close(
    float(iso.unfold(np.float32(y), np.float32(a))), u, rtol=1e-4, atol=1e-30
  )


def test_isometric_layer_reads_no_padding():
  of = layers()
  w = weights(of)
  x = tokens().astype(np.float32)
  y, _ = compiled(of)(w, x, None, HOLES)
  x[~HOLES] = np.nan
  other, _ = compiled(of)(w, x, None, HOLES)
  chex.assert_trees_all_equal(np.asarray(y)[HOLES], np.asarray(other)[HOLES])


def test_one_token_reaches_all_others():
  """Between whole sequences: what TransJect's layers do not do."""
  of = layers()
  w = weights(of)
  x = tokens().astype(np.float32)
  moved = x.copy()
  moved[0, 3] += 1
  run = compiled(of)
  after, before = (np.asarray(run(w, z, None, MASK)[0]) for z in (moved, x))
  sizes = np.linalg.norm((after - before)[0], axis=-1)
  assert_between(sizes, 1e-4, np.inf)
  assert not (after - before)[1].any()


def test_max_steps_suffice_for_the_greatest_rate():
  for a, rate in (("wide", 0.9), ("budget", 1 - (2 / 3) ** 2)):
    steps = layers("feed_forward", a).max_steps()
    assert rate**steps < np.finfo(np.float64).eps
