import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import orthogonal
from tests import draws


def arrays(seed, d, scale, count=2):
  return scale * draws.normal(seed, (count, d, d))


@pytest.mark.slow
def test_rotations_map_skew_leaves_and_nothing_else():
  a = {
    "layer": {"u_skew": arrays(0, 5, 1.0, 3), "bias": jnp.ones(5)},
    "other": {"v_skew": arrays(1, 5, 1.0, 1)[0]},
    "small_skew": arrays(2, 2, 1.0, 2),
  }
  q = orthogonal.rotations(a, "cayley")
  assert sorted(q) == ["layer", "other", "small_skew"]
  assert sorted(q["layer"]) == ["u_skew"]
  want = {
    "layer": {"u_skew": orthogonal.cayley(a["layer"]["u_skew"])},
    "other": {"v_skew": orthogonal.cayley(a["other"]["v_skew"])},
    "small_skew": orthogonal.cayley(a["small_skew"]),
  }
  chex.assert_trees_all_close(q, want, atol=1e-6)
  assert orthogonal.rotations({"bias": jnp.ones(3)}, "cayley") == {}


def test_rotations_are_one_call_for_each_size(monkeypatch):
  calls = []

  def count(a):
    calls.append(a.shape)
    return a

  monkeypatch.setitem(orthogonal.MAPS.data, "cayley", count)
  params = {f"{i}_skew": jnp.zeros((i, 4, 4)) for i in range(1, 4)}
  orthogonal.rotations(params | {"x_skew": jnp.zeros((2, 2))}, "cayley")
  assert sorted(calls) == [(1, 2, 2), (6, 4, 4)]


def test_rotations_of_half_precision_parameters_are_float32():
  a = {"u_skew": arrays(0, 8, 1.0).astype(jnp.bfloat16)}
  q = orthogonal.rotations(a, "cayley")["u_skew"]
  assert q.dtype == jnp.float32
  assert float(orthogonal.orthogonality_defect(q).max()) <= 5e-6


def test_rotations_refuse_an_unknown_map():
  with pytest.raises(
    ValueError, match="map.*'qr'.*cayley, expm, householder, matrix"
  ):
    orthogonal.rotations({}, "qr")


def test_rotations_multiply_the_base_from_the_left():
  a = {"layer": {"u_skew": arrays(0, 5, 1.0, 3)}}
  bases = orthogonal.rotations(
    {"layer": {"u_skew": arrays(1, 5, 1.0, 3)}}, "expm"
  )
  q = orthogonal.rotations(a, "cayley", bases)["layer"]["u_skew"]
  want = orthogonal.cayley(a["layer"]["u_skew"], bases["layer"]["u_skew"])
  chex.assert_trees_all_close(q, want, atol=1e-6)
  assert not np.allclose(q, orthogonal.cayley(a["layer"]["u_skew"]), atol=0.1)


def test_parameter_name_says_skew_or_orthogonal():
  assert orthogonal.parameter_name("u", "cayley") == "u_skew"
  assert orthogonal.parameter_name("u", "matrix") == "u_orthogonal"
  q = orthogonal.expm(arrays(0, 5, 1.0, 3))
  found = orthogonal.rotations({"u_orthogonal": q, "u": q}, "matrix")
  chex.assert_trees_all_close(found, {"u_orthogonal": q}, atol=1e-6)
