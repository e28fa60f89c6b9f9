"""What models know of a mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformers.foundations import platforms
from jaxformers.foundations.platforms import MODEL, SEQUENCE, by_device
from jaxformers.models import parallel
from jaxformers.models.mixers import convolution
from jaxformers.models.parallel import (
  column_sums,
  dot_general,
  each_sample,
  experts_are_spread,
  product,
  repeat,
  row_sums,
)
from tests import draws


def test_experts_are_spread_where_the_mesh_says_so():
  devices = np.array(jax.devices())
  assert not experts_are_spread()
  for shape, want in (((2, 2), True), ((4, 1), False)):
    mesh = Mesh(devices.reshape(shape), ("data", MODEL))

    def seen(x, mesh=mesh):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return x, experts_are_spread()

    assert jax.eval_shape(lambda x: seen(x)[0], 1.0).shape == ()
    assert jax.jit(seen)(1.0)[1] == want


def test_dot_general_keeps_split_tokens_on_their_devices():
  """One matrix of all tokens would be gathered on every device."""
  devices = np.array(jax.devices()[:4])
  rng = np.random.default_rng(0)
  x, w = (rng.normal(size=s).astype(np.float32) for s in ((4, 8, 3), (3, 5)))
  for shape, axes in (((2, 2), ("data", SEQUENCE)), ((4, 1), ("data", MODEL))):
    mesh = Mesh(devices.reshape(shape), axes)
    spec = PartitionSpec("data", SEQUENCE if SEQUENCE in axes else None)
    placed = jax.device_put(x, NamedSharding(mesh, spec))

    def run(x, w, mesh=mesh):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return product(x, w)

    program = jax.jit(run).lower(placed, w).compile()
    assert not any(
      name in program.as_text() for name in ("all-gather", "all-to-all")
    )
    chex.assert_trees_all_close(program(placed, w), x @ w, atol=1e-5)


def on_mesh(function, *arrays, shape=(2, 2), axes=("data", "fsdp")):
  """Compiles a function of arrays whose rows are split over four devices."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), axes)
  split = NamedSharding(mesh, PartitionSpec(axes))
  arrays = [jax.device_put(x, split) for x in arrays]

  def run(*arrays):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*arrays)

  program = jax.jit(run).lower(*arrays).compile()
  return program.as_text(), program(*arrays)


def test_by_device_sees_the_rows_of_one_device():
  x, w = draws.normal(0, (8, 3)), draws.normal(1, (3,))

  def function(x, w):
    return {"rows": x * w, "sum": (x * w).sum(0, keepdims=True)}

  _, got = on_mesh(lambda x: by_device(function, x, w), x)
  chex.assert_trees_all_close(got["rows"], x * w, rtol=1e-6)
  sums = (x * w).reshape(4, 2, 3).sum(1)
  chex.assert_trees_all_close(got["sum"], sums, rtol=1e-6)
  # Without a mesh, or with rows that do not split, all rows are on one device.
  for rows in (x, x[:2]):
    assert by_device(function, rows, w)["sum"].shape == (1, 3)
  _, alone = on_mesh(lambda x: by_device(function, x[:2], w), x)
  assert alone["sum"].shape == (1, 3)


def test_a_convolution_over_devices_gathers_no_rows():
  x, kernel = draws.normal(0, (8, 12, 3)), draws.normal(1, (3, 12))
  mask = draws.normal(2, (8, 12)) > -0.5

  def loss(kernel, x, mask):
    y = convolution.convolve(convolution.to_front(x, mask), kernel)
    return jnp.square(convolution.move_back(y, mask)).mean()

  value = jax.value_and_grad(loss, (0, 1))
  text, got = on_mesh(lambda x, mask: value(kernel, x, mask), x, mask)
  assert "all-gather" not in text
  assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
  chex.assert_trees_all_close(got, value(kernel, x, mask), atol=1e-5)


@pytest.mark.parametrize(
  ("x", "w", "axes"),
  [
    ((2, 3, 4), (4, 5), ((2,), (0,))),
    ((2, 3, 4), (4, 5, 6), ((2,), (0,))),
    ((2, 3, 4, 5), (4, 5, 6), ((2, 3), (0, 1))),
  ],
)
def test_dot_general_flattens_tokens_to_the_same_product(x, w, axes):
  x, w = (draws.normal(len(s), s) for s in (x, w))
  dimensions = (axes, ((), ()))
  want = jax.lax.dot_general(x, w, dimensions)
  chex.assert_trees_all_close(dot_general(x, w, dimensions), want, atol=1e-5)
  program = jax.jit(lambda x, w: dot_general(x, w, dimensions)).lower(x, w)
  (line,) = [s for s in program.as_text().splitlines() if "dot_general" in s]
  assert "tensor<6x" in line  # Two samples of three tokens.


@pytest.mark.parametrize("is_cpu", [True, False])
def test_row_sums_and_column_sums_are_sums(monkeypatch, is_cpu):
  monkeypatch.setattr(parallel, "on_one_cpu", lambda: is_cpu)
  x = draws.normal(0, (2, 3, 5))
  chex.assert_trees_all_close(row_sums(x), x.sum(-1, keepdims=True), rtol=1e-5)
  chex.assert_trees_all_close(column_sums(x), x.sum((0, 1)), rtol=1e-5)
  # The gradient of what is repeated is the sum over the copies.
  row = x[0]
  chex.assert_trees_all_equal(repeat(row, 4), jnp.stack([row] * 4))
  slope = jax.grad(lambda row: (repeat(row, 2) * x).sum())(row)
  chex.assert_trees_all_close(slope, x.sum(0), rtol=1e-5)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_each_sample_maps_over_samples(monkeypatch, is_cpu):
  monkeypatch.setattr(parallel, "on_one_cpu", lambda: is_cpu)
  x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(2.0)
  got = each_sample(lambda x, y: (x[0] * y, x), x, y)
  chex.assert_trees_all_equal(got, (x[:, 0] * y, x))


def test_on_gpus_compares_the_compute_capability(monkeypatch):
  assert not parallel.on_gpus(8.0)
  monkeypatch.setattr(parallel.jax, "default_backend", lambda: "gpu")
  for name, want in (("9.0", True), ("7.5", False), ("gfx90a", False)):
    device = type("Device", (), {"compute_capability": name})
    monkeypatch.setattr(parallel.jax, "devices", lambda device=device: [device])
    assert parallel.on_gpus(8.0) == want


@pytest.mark.slow
def test_portable_disables_device_specific_forms():
  assert parallel.on_one_cpu()
  with platforms.portable():
    assert not parallel.on_one_cpu()
    assert not parallel.on_gpus(0.0)
  assert parallel.on_one_cpu()
