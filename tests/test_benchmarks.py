"""Benchmarks are not run as tests; that they can be is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
  data,
  depth,
  encoders,
  fidelity,
  orthogonal,
  scaling,
  training,
)
from jaxformers import models
from jaxformers.models.attention import MIXERS


def test_the_loader_and_its_table(monkeypatch):
  monkeypatch.setattr(data, "ROUNDS", 1)
  rows = data.loader_speed(batches=20)
  assert [row["what"] for row in rows] == ["loader", "NumPy, a matrix"]
  assert all(row["batches/s"] > 0 for row in rows)
  text = data.table(rows).splitlines()
  assert text[0].startswith("| what | batches/s |")
  assert len(text) == 4


def test_growth_is_a_fitted_exponent(monkeypatch):
  monkeypatch.setattr(encoders, "ROUNDS", 1)
  (row,) = encoders.growth(["local"], (512, 1024))
  assert row["longest"] == 1024
  assert 0.9 < row["exponent of memory"] < 1.1
  assert data.table([row]).splitlines()[2].startswith("| local | 1024 |")


def test_the_librarys_attention_is_softmax():
  encoders.register_library()
  try:
    encoders.register_library()  # Once is enough.
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 9, 8)), jnp.float32)
    mask = jnp.arange(9)[None] < jnp.array([[9], [4]])
    kw = {"mask": mask, "carry": None, "train": False}
    own, other = MIXERS["softmax"](), MIXERS["dot_product_attention"]()
    variables = own.init(jax.random.key(0), x, **kw)
    y, z = (m.apply(variables, x, **kw)[0] for m in (own, other))
    np.testing.assert_allclose(y[0], z[0], atol=1e-5)
    np.testing.assert_allclose(y[1, :4], z[1, :4], atol=1e-5)
  finally:
    models.MODELS._entries.pop("dot_product_attention")
    MIXERS._entries.pop("dot_product_attention")


@pytest.mark.usefixtures("one_device")
def test_a_few_steps_of_training_are_a_row(monkeypatch, tmp_path, request):
  monkeypatch.chdir(request.config.rootpath)
  small = {"num_train": 200, "num_validation": 20, "num_test": 20}
  small |= {"min_length": 20, "max_length": 40}
  monkeypatch.setattr(training, "TASK", small)
  row = training.train("local", "float32", 4, tmp_path)
  assert row["all finite"]
  assert 1 < row["entropy of classes"] < np.log(10)


def test_depth_costs_and_training_are_rows(monkeypatch, tmp_path, request):
  monkeypatch.chdir(request.config.rootpath)
  small = {"num_train": 200, "num_validation": 20, "num_test": 20}
  small |= {"min_length": 20, "max_length": 40}
  monkeypatch.setattr(depth, "TASK", small)
  before, after = depth.train(2, 2, tmp_path)
  assert before["factor"] == before["least"] == before["greatest"] == 1
  assert after["greatest"] > 1
  assert before["entropy in"] == before["entropy out"] != after["entropy out"]


def test_maps_are_measured_and_stay_orthogonal(monkeypatch):
  monkeypatch.setattr(orthogonal, "COUNT", 2)
  monkeypatch.setattr(orthogonal, "TORCH_MAPS", {})  # Not a test dependency.
  rows = orthogonal.measure(8, 1) + orthogonal.many(3, 8)
  assert {row["map"].removeprefix("ours: ") for row in rows} == {
    "cayley",
    "expm",
    "householder",
    "matrix",
  }
  assert all(row["defect"] < 5e-6 for row in rows)


def test_the_cost_of_the_term_is_a_ratio():
  rows = fidelity.measure(size=32, batch=1, layers=2, rounds=1)
  assert [row["what"] for row in rows] == ["forward", "step"]
  for row in rows:
    assert row["time"] == pytest.approx(
      row["with the term s"] / row["softmax s"]
    )
    assert 0.9 < row["memory"] < 1.5


PROGRAM = """
  %a = (f32[4]{0}, f32[2,3]{1,0}, /*index=2*/f32[]) all-reduce(%x, %y, %z), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  %b = f32[8,4]{1,0} all-gather(%x), replica_groups=[2,2]<=[4], dimensions={0}
  %c = bf16[8]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %d = f32[2]{0} reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b'}, to_apply=%add
  %e = f32[6]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %f = f32[4]{0} add(%a.0, %e)
"""  # noqa: E501


def test_what_a_program_exchanges():
  assert scaling.collectives(PROGRAM) == {
    "all-reduce": (1, 2 * 3 / 4 * 44),
    "all-gather": (2, 128 / 2 + 16 * 3 / 4),
    "reduce-scatter": (1, 8 * 7),
    "collective-permute": (1, 24.0),
  }
  with pytest.raises(ValueError, match="No groups of devices"):
    scaling.collectives("%a = f32[4]{0} all-reduce(%x), to_apply=%add")


def test_meshes_of_a_batch():
  plans = scaling.plans(32, 4096)
  assert ("strong", "data:32,sequence:16", 512, 32) in plans
  assert ("weak", "data:64", 64, 2048) in plans
  assert all(count <= 512 for _, _, count, _ in plans)
  # A length that cannot be split has no more devices than rows.
  odd = [n for kind, _, n, _ in scaling.plans(32, 15) if kind == "strong"]
  assert max(odd) == 32
