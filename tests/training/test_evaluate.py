import jax
import numpy as np
import pytest

from jaxformers import models
from jaxformers.data.engine.packed import pack
from jaxformers.training import compilers, evaluate, losses
from tests import initial
from tests.marks import long_except, slow_except


@pytest.fixture(scope="module")
def example():
  model = models.build(
    "transject", vocab_size=9, max_len=6, num_classes=3, d_model=8, num_layers=1
  )
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 9, rng.integers(1, 7)) for _ in range(13)]
  split = pack(rows, rng.integers(0, 3, 13))
  ids = split.batch(np.arange(13), 6)["inputs"]
  params = initial.params(model, ids)
  logits = np.asarray(
    model.apply({"params": params}, ids, train=False), np.float64
  )
  log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  return (
    model,
    params,
    split,
    {
      "accuracy": np.mean(logits.argmax(1) == split.labels),
      "loss": -np.mean(log_p[np.arange(13), split.labels]),
    },
  )


@pytest.mark.parametrize("mode", sorted(compilers.COMPILERS))
@pytest.mark.parametrize("devices", long_except([3], [1, 3, 4]))
@pytest.mark.parametrize("batch_size", slow_except([5], [5, 13, 16], [5, 16]))
def test_evaluator_counts_every_example_once(
  example, monkeypatch, mode, devices, batch_size
):
  monkeypatch.setattr(compilers, "devices", lambda: jax.devices()[:devices])
  model, params, split, want = example
  run = evaluate.Evaluator(model, mode, batch_size, (6,))
  done = []
  scores = run(compilers.layout().place_state(params), split, done.append)
  assert scores["count"] == 13
  assert scores["accuracy"] == want["accuracy"]
  assert scores["loss"] == pytest.approx(want["loss"], rel=1e-5)
  assert done[-1] == 13
  assert run.batch_size % devices == 0


def test_add_sums_and_means_divide_once():
  total = evaluate.add_sums({}, {"loss": 3.0, "correct": 1.0, "count": 2.0})
  total = evaluate.add_sums(total, {"loss": 1.0, "correct": 1.0, "count": 1.0})
  assert total == {"loss": 4.0, "correct": 2.0, "count": 3.0}
  means = losses.LOSSES["classification"].means(total)
  assert means == {"loss": 4 / 3, "accuracy": 2 / 3, "count": 3}
  areas = evaluate.add_sums({}, {"hits": np.array([1, 2])})
  areas = evaluate.add_sums(areas, {"hits": np.array([3, 4])})
  assert areas == {"hits": [4.0, 6.0]}  # Plain, for it is saved as JSON.
