import jax
import numpy as np
import pytest

from jaxformers.training import parallel


def step(state, batch, *, axis_name=None):
  total = batch["x"].sum()
  if axis_name is not None:
    total = jax.lax.psum(total, axis_name)
  return state + total


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("mode", sorted(parallel.COMPILERS))
def test_a_batch_is_split_and_summed(mode, count, monkeypatch):
  monkeypatch.setattr(parallel, "devices", lambda: jax.devices()[:count])
  layout = parallel.layout()
  compiled, place = parallel.compile_step(mode, step, layout)
  batch = place({"x": np.arange(8.0, dtype=np.float32)})
  assert len(batch["x"].sharding.device_set) == count
  assert compiled(layout.place(np.float32(1)), batch) == 29


def test_a_batch_that_does_not_split():
  parallel.check_batch("batch_size", 12, 4, "4 devices")
  with pytest.raises(ValueError, match="batch_size=10 .*4 devices.*8 or 12"):
    parallel.check_batch("batch_size", 10, 4, "4 devices")
  with pytest.raises(ValueError, match="batch_size=3 .*such as 4"):
    parallel.check_batch("batch_size", 3, 4, "4 devices")


def test_unknown_mode():
  with pytest.raises(ValueError, match="parallel mode 'xmap'.*jit, pmap"):
    parallel.compile_step("xmap", step, parallel.layout())


def test_pmap_splits_batches_alone():
  layout = parallel.layout("data:2,model:2")
  with pytest.raises(ValueError, match="pmap.*splits batches alone"):
    parallel.compile_step("pmap", step, layout)
