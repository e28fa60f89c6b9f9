import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import orthogonal

pytestmark = pytest.mark.slow

MAPS = sorted(orthogonal.MAPS)


def rotations(seed, d, count=2):
  q = np.linalg.qr(np.random.default_rng(seed).normal(size=(count, d, d)))[0]
  q[np.linalg.det(q) < 0, :, 0] *= -1
  return q


def mapped(a, name, base=None):
  with jax.enable_x64(True):
    base = None if base is None else jnp.asarray(base)
    return np.asarray(orthogonal.MAPS[name](jnp.asarray(a), base))


@pytest.mark.parametrize("name", MAPS)
@given(seed=st.integers(0, 99), d=st.sampled_from([1, 2, 3, 8]))
@pytest.mark.slow
def test_parameters_of_a_rotation_map_back_to_it(name, seed, d):
  q = rotations(seed, d)
  try:
    a = orthogonal.parameters(q, name)
  except ValueError as error:
    # These three cannot reach all rotations.
    assert name in ("bro", "cayley", "householder"), error
    return
  np.testing.assert_allclose(mapped(a, name), q, atol=1e-8)


@pytest.mark.parametrize("name", MAPS)
def test_parameters_with_a_base_reach_other_matrices(name):
  half_turn = np.diag([-1.0, -1.0, 1.0])[None]
  # A map that all others reach.
  turned = half_turn @ mapped(0.3 * np.ones((1, 3, 3)), "bro")
  a = orthogonal.parameters(turned, name, base=half_turn)
  np.testing.assert_allclose(mapped(a, name, half_turn), turned, atol=1e-10)
  zero = orthogonal.parameters(half_turn, name, base=half_turn)
  if name != "matrix":
    np.testing.assert_allclose(zero, 0, atol=1e-12)


@pytest.mark.parametrize("d", [2, 5, 8])
def test_parameters_of_bro_are_those_of_its_block(d):
  a = np.random.default_rng(0).normal(size=(2, d, d))
  found = orthogonal.parameters(mapped(a, "bro"), "bro")
  r = d // 2
  np.testing.assert_allclose(found[:, r:, :r], a[:, r:, :r], atol=1e-8)
  assert np.count_nonzero(found) == 2 * r * (d - r)
  with pytest.raises(ValueError, match="Matrix 0 .*block.*base.*'expm'"):
    orthogonal.parameters(mapped(0.1 * np.ones((1, 5, 5)), "cayley"), "bro")


@pytest.mark.parametrize("name", ["cayley", "householder"])
def test_parameters_refuse_matrices_a_map_cannot_reach(name):
  with pytest.raises(ValueError, match="[Mm]atrix 0 .*base.*'expm'"):
    orthogonal.parameters(np.diag([-1.0, -1.0, 1.0]), name)


def test_parameters_of_expm_reach_half_turns():
  q = rotations(0, 6, 1)[0]
  q = q @ np.diag([-1.0, -1, -1, -1, 1, 1]) @ q.T
  a = orthogonal.parameters(q, "expm")
  np.testing.assert_allclose(mapped(a, "expm"), q, atol=1e-10)


@pytest.mark.parametrize("name", sorted({*MAPS} - {"matrix"}))
def test_parameters_refuse_reflections_without_a_base(name):
  mirror = np.diag([1.0, -1.0, 1.0])
  with pytest.raises(ValueError, match="determinant -1.*base"):
    orthogonal.parameters(mirror, name)
  a = orthogonal.parameters(mirror, name, base=mirror)
  np.testing.assert_allclose(mapped(a, name, mirror), mirror, atol=1e-12)


def test_parameters_refuse_matrices_that_are_not_orthogonal():
  with pytest.raises(ValueError, match="[Mm]atrix 1 .*orthogonal.*polar"):
    orthogonal.parameters(np.stack([np.eye(3), 2 * np.eye(3)]), "expm")
  with pytest.raises(ValueError, match="map.*'qr'.*cayley"):
    orthogonal.parameters(np.eye(3), "qr")
