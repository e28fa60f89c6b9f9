"""Arrays of a state: what is compared, and where it is placed."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.training import arrays
from jaxformers.training.arrays import checksums
from jaxformers.training.state import TrainState


def state(step):
  value = jnp.arange(3, dtype=jnp.float32) + step
  return TrainState(jnp.int32(step), {"w": value}, (value * 2,))


def test_checksums_cover_every_leaf():
  one = checksums(state(1))
  assert sorted(one) == [".opt_state[0]", ".params['w']", ".step"]
  other = checksums(state(1).replace(step=jnp.int32(2)))
  assert [key for key in one if one[key] != other[key]] == [".step"]


def test_check_shapes_compares_by_path():
  saved = arrays.shapes_of(state(1))
  assert saved == {"step": [], "params/w": [3], "opt_state/0": [3]}
  arrays.check_shapes(Path("run"), saved, saved)
  for name, shape in (("params/w", [4]), ("params/b", [3])):
    with pytest.raises(ValueError, match=f"{name} .*{re.escape(str(shape))}"):
      arrays.check_shapes(Path("run"), saved, saved | {name: shape})


def test_place_like_keeps_sharding_and_type():
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  split = jax.NamedSharding(mesh, jax.P("data"))
  like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)
  placed = arrays.place_like(np.arange(8), like)
  assert placed.sharding == split
  assert placed.dtype == jnp.float32
  np.testing.assert_array_equal(arrays.fetch_to_host(placed), np.arange(8))
