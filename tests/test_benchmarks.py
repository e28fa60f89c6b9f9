"""Benchmarks are not run as tests; that they can be is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import data, depth, encoders, fidelity, orthogonal, training
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
