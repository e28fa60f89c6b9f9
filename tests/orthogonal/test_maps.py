import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import orthogonal
from tests import draws, optimizers
from tests.marks import long_except

MAPS = sorted({*orthogonal.MAPS} - {"matrix"})
# One program for each: operations one by one take long to compile.
compiled = {name: jax.jit(mapping) for name, mapping in orthogonal.MAPS.items()}
cayley, expm = compiled["cayley"], compiled["expm"]
defect = jax.jit(orthogonal.orthogonality_defect)
small = st.sampled_from([1, 2, 7, 32, 33])
scales = st.floats(0.0, 8.0)


def arrays(seed, d, scale, count=2):
  return scale * draws.normal(seed, (count, d, d))


@pytest.mark.parametrize("name", MAPS)
@given(seed=st.integers(0, 99), d=small, scale=scales)
def test_maps_give_rotations(name, seed, d, scale):
  q = compiled[name](arrays(seed, d, scale))
  chex.assert_tree_all_finite(q)
  assert float(defect(q).max()) <= 5e-6
  np.testing.assert_allclose(np.linalg.det(q), 1, atol=1e-4)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("scale", [1.5 / 512**0.5, 1.0])
def test_maps_defect_at_size_512_is_small(name, scale):
  q = compiled[name](arrays(0, 512, scale, 1))
  assert float(defect(q).max()) <= 5e-6


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_zero_are_the_identity_and_ignore_the_upper_triangle(name):
  a = arrays(0, 7, 1.0)
  a = np.asarray(a)
  eye = np.broadcast_to(np.eye(7, dtype=a.dtype), a.shape)
  chex.assert_trees_all_close(compiled[name](0 * a), eye, atol=0)
  changed = a + 5 * np.triu(np.ones((7, 7), a.dtype))
  chex.assert_trees_all_equal(compiled[name](a), compiled[name](changed))


def test_cayley_is_its_formula_in_float64():
  with jax.enable_x64(True):
    a = np.random.default_rng(0).normal(size=(3, 50, 50))
    s = (np.tril(a, -1) - np.tril(a, -1).transpose(0, 2, 1)) / 2
    want = np.linalg.solve(np.eye(50) - s, np.eye(50) + s)
    chex.assert_trees_all_close(np.asarray(cayley(a)), want, atol=1e-12)


def test_cayley_and_expm_agree_to_second_order():
  a = 1e-2 * arrays(0, 6, 1.0)
  chex.assert_trees_all_close(cayley(a), expm(a), atol=1e-5)
  assert not np.allclose(cayley(a), np.eye(6), atol=1e-3)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("d", [3, 37])
def test_maps_gradient_matches_finite_differences(name, d):
  with jax.enable_x64(True):
    a = np.random.default_rng(1).normal(size=(2, d, d)) / d**0.5
    w = np.random.default_rng(2).normal(size=(2, d, d))

    @jax.jit
    def f(a):
      return jnp.sum(jnp.sin(orthogonal.MAPS[name](a)) * w)

    direction = np.random.default_rng(3).normal(size=a.shape)
    slope = np.vdot(jax.jit(jax.grad(f))(a), direction)
    h = 1e-6
    difference = (f(a + h * direction) - f(a - h * direction)) / (2 * h)
    np.testing.assert_allclose(slope, difference, rtol=1e-7)


def test_initializer_spreads_the_angles():
  a = orthogonal.initializer(jax.random.key(0), (1, 128, 128))
  angles = np.abs(np.angle(np.linalg.eigvals(np.asarray(expm(a))[0])))
  assert 2.5 < angles.max() < np.pi
  assert 1.0 < angles.mean() < 1.6


def test_maps_need_no_type_or_rank_promotion(strict):
  chex.assert_shape(orthogonal.cayley(arrays(0, 5, 1.0)), (2, 5, 5))
  chex.assert_shape(orthogonal.expm(arrays(0, 5, 1.0)), (2, 5, 5))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("scale", [10.0, 1000.0])
def test_maps_give_rotations_far_from_zero(name, scale):
  q = compiled[name](arrays(0, 64, scale))
  assert float(defect(q).max()) <= 5e-6


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_a_nan_matrix_leave_the_rest_of_the_batch(name):
  a = arrays(0, 8, 30.0, 3)
  broken = np.array(a)
  broken[1] = np.nan
  q, want = (np.asarray(compiled[name](one)) for one in (broken, a))
  assert np.isnan(q[1]).any()
  chex.assert_trees_all_close(q[0::2], want[0::2], atol=1e-6)


def of_norm(norm, d, count=2):
  """Lower triangles [count, d, d] whose skew matrices have a spectral norm."""
  a = np.tril(np.random.default_rng(d).normal(size=(count, d, d)), -1)
  s = a - a.swapaxes(1, 2)
  # Divide first: the spectral norm may be near the greatest float32.
  scales = np.linalg.norm(s, 2, axis=(1, 2), keepdims=True)
  return (a / scales * norm).astype(np.float32)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("d", [3, 4, 33])
def test_maps_give_rotations_up_to_the_greatest_float32(name, d):
  """Odd sizes have an eigenvalue 0, and lose digits first."""
  mapping = orthogonal.MAPS[name]
  slope = jax.jit(jax.grad(lambda a: jnp.sin(mapping(a)).sum()))
  mapping = compiled[name]
  for norm in (500, 1e3, 3e3, 1e4, 1e5, 1e6, 1e8, 1e19, 1e30, 3e38):
    a = of_norm(norm, d)
    q = mapping(a)
    chex.assert_tree_all_finite((q, slope(a)))
    assert float(defect(q).max()) <= 5e-6, norm
    np.testing.assert_allclose(np.linalg.det(q), 1, atol=1e-4)


@pytest.mark.parametrize("d", [3, 33])
@pytest.mark.parametrize("norm", [300, 3e3, 3e4])
def test_cayley_of_large_norm_and_its_gradient_are_the_formula(norm, d):
  def sine(a):
    return jnp.sin(orthogonal.cayley(a)).sum()

  a = of_norm(norm, d)
  q, slope = jax.jit(lambda a: (orthogonal.cayley(a), jax.grad(sine)(a)))(a)
  with jax.enable_x64(True):
    exact = np.asarray(a, np.float64)
    s = (exact - exact.swapaxes(1, 2)) / 2
    want = np.linalg.solve(np.eye(d) - s, np.eye(d) + s)
    want_slope = np.asarray(jax.jit(jax.grad(sine))(exact))
  chex.assert_trees_all_close(np.asarray(q, np.float64), want, atol=2e-5)
  scale = np.abs(want_slope).max()
  chex.assert_trees_all_close(
    np.asarray(slope, np.float64) / scale,
    want_slope / scale,
    atol=3e-8 * norm,
  )


@pytest.mark.parametrize("name", ["cayley", "expm"])
def test_maps_beyond_their_range_depend_on_the_direction_only(name):
  mapping = compiled[name]
  a = of_norm(1e7, 5)
  chex.assert_trees_all_close(mapping(a), mapping(1e20 * a), atol=0.05)
  # So the slope along the matrix itself is 0, but not the others.
  slope = jax.jit(jax.grad(lambda a: jnp.sin(mapping(a)).sum()))(a)
  along = np.vdot(slope, a) / np.linalg.norm(a)
  assert abs(along) < 0.02 * np.linalg.norm(slope)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.slow
def test_maps_of_a_large_matrix_leave_the_rest_of_the_batch(name):
  mapping = compiled[name]
  a = np.concatenate([arrays(0, 5, 1.0), of_norm(1e6, 5)])
  want = np.concatenate([mapping(part) for part in np.split(a, 2)])
  chex.assert_trees_all_close(mapping(a), want, atol=2e-6)
  chex.assert_trees_all_close(jax.jit(jax.vmap(mapping))(a), want, atol=2e-6)


@pytest.mark.parametrize("name", ["bro", "cayley", "householder"])
def test_maps_have_forward_mode_derivatives(name):
  a, da = arrays(0, 5, 1.0), arrays(1, 5, 1.0)
  mapping = orthogonal.MAPS[name]
  _, tangent = jax.jit(lambda a, da: jax.jvp(mapping, (a,), (da,)))(a, da)
  w = arrays(2, 5, 1.0)
  slope = jax.jit(jax.grad(lambda a: (mapping(a) * w).sum()))(a)
  np.testing.assert_allclose(np.vdot(tangent, w), np.vdot(slope, da), rtol=1e-4)


@pytest.mark.parametrize("d", [4, 7])
def test_bro_is_the_product_of_two_block_reflections(d):
  r = d // 2
  with jax.enable_x64(True):
    a = np.random.default_rng(0).normal(size=(d, d))

    def reflection(block):
      v = np.concatenate([np.eye(r), block])
      return np.eye(d) - 2 * v @ np.linalg.solve(v.T @ v, v.T)

    want = reflection(a[r:, :r]) @ reflection(0 * a[r:, :r])
    np.testing.assert_allclose(compiled["bro"](a), want, atol=1e-12)
    block = np.zeros_like(a)
    block[r:, :r] = 2 * a[r:, :r]
    np.testing.assert_allclose(cayley(block), want, atol=1e-12)


def test_householder_is_the_product_of_its_reflections():
  with jax.enable_x64(True):
    a = np.random.default_rng(0).normal(size=(6, 6))
    want = -np.eye(6)
    for i in range(6):
      v = np.eye(6)[i] + np.tril(a, -1)[:, i]
      want = want @ (np.eye(6) - 2 * np.outer(v, v) / (v @ v))
    found = compiled["householder"](a)
    np.testing.assert_allclose(found, want, atol=1e-12)


@pytest.mark.parametrize("name", sorted(orthogonal.MAPS))
def test_maps_multiply_the_base_from_the_left(name):
  a, base = arrays(0, 5, 0.3), expm(arrays(1, 5, 1.0))
  if name == "matrix":
    a = expm(a)
  mapping = compiled[name]
  want = np.matmul(base, mapping(a))
  chex.assert_trees_all_close(mapping(a, base), want, atol=1e-6)


@pytest.mark.parametrize(
  "name", long_except(("cayley", "matrix"), sorted(orthogonal.MAPS))
)
@pytest.mark.slow
def test_maps_stay_orthogonal_over_10000_steps(name):
  """And the maps end, every time: products alone cannot hang."""
  leaf = orthogonal.parameter_name("u", name)
  start = arrays(0, 8, 0.5)
  params = {leaf: cayley(start) if name == "matrix" else start}
  tx, _ = optimizers.build(
    {"name": "adam"}, {"name": "constant", "learning_rate": 1e-2}, 10_000
  )

  def step(both, key):
    params, state = both
    noise = jax.random.normal(key, (2, 8, 8))
    grads = jax.grad(
      lambda p: (orthogonal.rotations(p, name)[leaf] * noise).sum()
    )(params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  keys = jax.random.split(jax.random.key(1), 10_000)

  @jax.jit
  def run(params, keys):
    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
    return params, orthogonal.rotations(params, name)[leaf]

  params, q = run(params, keys)
  assert float(defect(q).max()) <= 5e-6
  assert np.abs(np.subtract(q, compiled[name](start))).max() > 0.1
  if name == "matrix":  # What is stored, not only what is read of it.
    assert float(defect(params[leaf]).max()) <= 5e-6
