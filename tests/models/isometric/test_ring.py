"""Filters on a ring: against the recurrence itself, and what they keep."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.models.isometric import ring
from tests.assertions import assert_between

WIDTH = 16
DILATIONS = (1, 6)  # 6 divides some lengths, and shares factors with others.


def sections(count=2, seed=0):
  """Eigenvalues of |lambda| from 0.1 to 0.99, float64 where it is enabled."""
  rng, shape = np.random.default_rng(seed), (count, WIDTH // 2)
  decay, angle = rng.uniform(-4.6, 0.8, shape), rng.uniform(0, 6.28, shape)
  dtype = jnp.result_type(float)
  return ring.Sections(decay.astype(dtype), angle.astype(dtype))


# One program: operations one by one take long to compile.
ring_filter = jax.jit(
  ring.ring_filter, static_argnums=3, static_argnames="inverse"
)


def oracle(x, filters, dilations):
  """The recurrence h_t = a h_(t-m) + s x_t on a ring, solved densely."""
  n, d = x.shape
  half = d // 2
  a = np.asarray(filters.eigenvalues(), np.complex128)
  z = x[:, :half] + 1j * x[:, half:]
  groups = len(dilations)
  for index, factors in zip(ring.delays(dilations, len(a)), a, strict=True):
    for c in range(half):
      step = dilations[index[c // (half // groups)]]
      back = np.roll(np.eye(n), step, 0)  # Row t has a one at t - m.
      back = back.T if c % 2 else back
      s = np.sqrt(1 - abs(factors[c]) ** 2)
      h = np.linalg.solve(np.eye(n) - factors[c] * back, s * z[:, c])
      z[:, c] = s * back @ h - np.conj(factors[c]) * z[:, c]
  return np.concatenate([z.real, z.imag], 1)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 12, 20])
def test_the_filter_is_the_closed_recurrence(n):
  """Alone, as a short row of a batch, and with holes."""
  rng = np.random.default_rng(n)
  with jax.enable_x64(True):
    filters = sections()
    x = rng.normal(size=(1, n, WIDTH))
    want = oracle(x[0], filters, DILATIONS)
    full = ring_filter(x, filters, np.ones((1, n), bool), DILATIONS)
    chex.assert_trees_all_close(full[0], want, atol=1e-12, rtol=0)
    # The same tokens among holes, which hold anything.
    mask = np.zeros((2, 25), bool)
    mask[0, np.sort(rng.choice(25, n, replace=False))] = True
    mask[1] = True
    longer = rng.normal(size=(2, 25, WIDTH))
    longer[0, mask[0]] = x[0]
    y = np.asarray(ring_filter(longer, filters, mask, DILATIONS))
  chex.assert_trees_all_close(y[0, mask[0]], want, atol=1e-12, rtol=0)
  assert not y[0, ~mask[0]].any()


@pytest.mark.parametrize("n", [7, 130])
def test_a_tpu_filters_full_rings_alike(n, monkeypatch):
  """There, 130 points have no fast transform."""
  rng = np.random.default_rng(n)
  x, y = rng.normal(size=(2, 2, n, WIDTH))

  def product(x, filters):
    mask = np.ones((2, n), bool)
    return (ring.ring_filter(x, filters, mask, DILATIONS) * y).sum()

  with jax.enable_x64(True):
    arguments = x, sections()
    want = jax.value_and_grad(product, argnums=(0, 1))(*arguments)
    monkeypatch.setattr(ring.platforms, "on_tpu", lambda: True)
    got = jax.value_and_grad(product, argnums=(0, 1))(*arguments)
  chex.assert_trees_all_close(got, want, atol=1e-11, rtol=0)


@functools.cache
def compiled(inverse):
  """Compiled once for all masks of a shape; one call of the other way."""

  def run(x, filters, mask):
    return ring.ring_filter(x, filters, mask, (1, 19), inverse=inverse)

  return jax.jit(run)


def norms(x):
  return np.sqrt(np.square(np.asarray(x, np.float64)).sum((1, 2)))


@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)]
)
@given(seed=st.integers(0, 2**31), length=st.integers(0, 2_000))
def test_norms_are_kept_and_the_adjoint_undoes_it(
  dtype, tolerance, seed, length
):
  """For every length to 2,000, holes in one sample, and none in the other."""
  rng = np.random.default_rng(seed)
  mask = np.arange(2_000)[None] < np.array([[length], [length]])
  mask[1] &= rng.random(2_000) < 0.7
  x = np.where(mask[..., None], rng.normal(size=(2, 2_000, WIDTH)), 0)
  with jax.enable_x64(dtype == np.float64):
    filters = sections(seed=seed % 7)
    filters = jax.tree.map(lambda leaf: leaf.astype(dtype), filters)
    x = x.astype(dtype)
    y = compiled(False)(x, filters, mask)
    back = compiled(True)(y, filters, mask)
    assert y.dtype == dtype
  size = norms(x)
  assert_between(np.abs(norms(y) - size), 0, tolerance * size)
  assert_between(norms(np.asarray(back) - x), 0, tolerance * size)


@pytest.mark.parametrize("n", [1, 2, 3, 97, 256, 1_999])
@pytest.mark.slow
def test_ring_filter_keeps_norms_of_full_batches(n):
  """By the Fourier transform of n points, n prime or a power of two."""
  x = np.random.default_rng(n).normal(size=(2, n, WIDTH))
  mask = np.ones((2, n), bool)
  with jax.enable_x64(True):
    filters = sections()
    y = ring_filter(x, filters, mask, (1, 19))
    back = ring_filter(y, filters, mask, (1, 19), inverse=True)
  chex.assert_trees_all_close(norms(y), norms(x), rtol=1e-12)
  assert_between(norms(np.asarray(back) - x), 0, 1e-12 * norms(x))


@pytest.mark.slow
def test_ring_filter_gradients_match_finite_differences():
  """Of tokens and eigenvalues, by finite differences, for both forms."""
  x = np.random.default_rng(0).normal(size=(2, 9, WIDTH))
  weights = np.random.default_rng(1).normal(size=x.shape)
  for length in (9, 5):
    mask = np.arange(9)[None] < np.array([[9], [length]])
    with jax.enable_x64(True):

      def loss(filters, x, mask=mask):
        y = ring.ring_filter(x, filters, mask, DILATIONS)
        return (weights * jnp.sin(y)).sum()

      filters = sections()
      loss = jax.jit(loss)
      grads = jax.jit(jax.grad(loss, (0, 1)))(filters, x)
      direction = jax.tree.map(
        lambda leaf: np.random.default_rng(2).normal(size=leaf.shape),
        (filters, x),
      )
      products = jax.tree.map(np.vdot, grads, direction)
      slope = float(sum(jax.tree.leaves(products)))

      def moved(step, start=(filters, x), direction=direction):
        start = jax.tree.map(np.asarray, start)
        return jax.tree.map(lambda p, v: p + step * v, start, direction)

      ends = [float(loss(*moved(step))) for step in (1e-5, -1e-5)]
    chex.assert_trees_all_close(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-6)


def test_ring_filter_reads_no_padding():
  filters = sections()
  x = np.random.default_rng(0).normal(size=(2, 30, WIDTH)).astype(np.float32)
  mask = np.arange(30)[None] < np.array([[30], [11]])
  y = ring_filter(x, filters, mask, DILATIONS)
  x[1, 11:] = np.nan
  chex.assert_trees_all_equal(y, ring_filter(x, filters, mask, DILATIONS))
  alone = ring_filter(x[1:, :11], filters, mask[1:, :11], DILATIONS)
  # Rounding of a frequency counts 1 / (1 - |lambda|) times near a resonance.
  chex.assert_trees_all_close(y[1:, :11], alone, atol=3e-5, rtol=0)


def test_spread_dilations_cover_the_length():
  assert ring.spread_dilations(64, 1_024) == (1, 2, 4, 8, 16, 32, 64, 128)
  assert ring.spread_dilations(32, 1) == (1,)
  assert 8 % len(ring.spread_dilations(32, 4_000)) == 0
  with pytest.raises(ValueError, match="d_model=6.*4"):
    ring.spread_dilations(6, 100)


def test_ring_filter_refuses_too_long_sequences():
  x = jax.ShapeDtypeStruct((1, ring.LONGEST + 1, WIDTH), jnp.float32)
  mask = jax.ShapeDtypeStruct(x.shape[:2], bool)
  with pytest.raises(ValueError, match=r"65537 tokens.*65536"):
    jax.eval_shape(
      lambda x, mask: ring.ring_filter(x, sections(), mask, DILATIONS), x, mask
    )
