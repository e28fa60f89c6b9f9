import jax
import numpy as np
import pytest

from jaxformers.training import compilers


def step(state, batch, *, axis_name=None):
  total = batch["x"].sum()
  if axis_name is not None:
    total = jax.lax.psum(total, axis_name)
  return state + total


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("mode", sorted(compilers.COMPILERS))
def test_compile_step_splits_a_batch_and_sums(mode, count, monkeypatch):
  monkeypatch.setattr(compilers, "devices", lambda: jax.devices()[:count])
  layout = compilers.layout()
  compiled, place = compilers.compile_step(mode, step, layout)
  batch = place({"x": np.arange(8.0, dtype=np.float32)})
  assert len(batch["x"].sharding.device_set) == count
  assert compiled(layout.place_state(np.float32(1)), batch) == 29


def test_check_batch_names_sizes_that_split():
  compilers.check_batch("batch_size", 12, 4, "4 devices")
  with pytest.raises(ValueError, match="batch_size=10.*4 devices.*8 or 12"):
    compilers.check_batch("batch_size", 10, 4, "4 devices")
  with pytest.raises(ValueError, match="batch_size=3.*4 devices"):
    compilers.check_batch("batch_size", 3, 4, "4 devices")


def test_compile_step_refuses_an_unknown_mode():
  with pytest.raises(ValueError, match="parallel.*'xmap'.*jit, pmap"):
    compilers.compile_step("xmap", step, compilers.layout())


def test_pmap_refuses_meshes_that_split_more_than_batches():
  layout = compilers.layout("data:2,model:2")
  with pytest.raises(ValueError, match='config.parallel="pmap".*config.mesh'):
    compilers.compile_step("pmap", step, layout)
