"""Estimates of runs, from costs of one layer and a measured rate."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from jaxformers.models import build, cost
from jaxformers.sweep import estimates, plans
from jaxformers.sweep.runs import Sweep
from jaxformers.training import ahead, topologies

pytestmark = pytest.mark.slow


def load(tmp_path, name="2", **options):
  cells = plans.make_cells(plans.find_plan(name), None, **options)
  sweep = Sweep(tmp_path, [])
  return [sweep.load_config(cell, 0) for cell in cells]


def test_estimate_gives_hours_and_memory_from_the_cost_of_an_example(tmp_path):
  (config, *_) = load(tmp_path, models=["transformer"])
  data = plans.DATA["listops"]
  count = cost.Cost(
    parameters=10**6, flops=10**9, elementwise=0, activations=10
  )
  found = estimates.estimate(config, data, count, rate=1e12)
  # Two layers; every step trains on 32 expressions, every 500th scores 2,000.
  examples = 3 * 50_000 * 32 + 100 * 2_000
  hours = examples * 2 * 1e9 / (estimates.SHARE * 1e12) / 3_600
  assert found.steps == 50_000
  assert found.hours == pytest.approx(hours)
  state = 2 * 10**6 * estimates.BYTES_OF_STATE
  assert found.gigabytes == pytest.approx((2 * 32 * 10 + state) / 1e9)
  # A pair has two sequences, and parts of a batch take turns.
  pair = estimates.estimate(
    dataclasses.replace(config, accumulate=4),
    plans.DATA["retrieval"],
    count,
    rate=1e12,
  )
  assert pair.hours > 2 * found.hours
  assert pair.gigabytes == pytest.approx((4 * 8 * 10 + state) / 1e9)


def test_estimate_all_matches_the_cost_of_the_model(tmp_path):
  configs = load(tmp_path, size="tiny", models=["transformer"])[:2]
  known = [plans.DATA["listops"], plans.DATA["text"]]
  found = estimates.estimate_all(configs, known, rate=1e12)
  for config, data, one in zip(configs, known, found, strict=True):
    sizes = dict(data.sizes)
    sizes["max_len"] = config.task.options.get("max_len") or sizes["max_len"]
    model = build(**vars(config.model), **sizes)
    whole = cost.count_cost(model, sizes["max_len"])
    memory = config.batch_size * whole.activations / 1e9
    assert one.gigabytes == pytest.approx(memory, rel=0.3)
    assert one.steps == config.total_steps


def test_measure_rate_is_plausible():
  assert 1e8 < estimates.measure_rate(256) < 1e16


def test_compiled_hours_follow_from_the_steps(tmp_path, monkeypatch):
  (config, *_) = load(tmp_path, models=["transformer"])

  class Compiled:
    """Steps of ten and of five milliseconds."""

    def __init__(self, given, devices, chip, sizes):
      assert given is config and len(devices) == 8
      assert chip is topologies.CHIPS["h100"] and sizes["max_len"] == 2_000

    def train(self):
      return SimpleNamespace(static_ms=10.0)

    def evaluation(self):
      return SimpleNamespace(static_ms=5.0)

  monkeypatch.setattr(ahead, "Ahead", Compiled)
  monkeypatch.setattr(topologies, "describe_devices", lambda name: [None] * 8)
  hours = estimates.compiled_hours(config, plans.DATA["listops"], "h100:8")
  calls = 100 * -(-2_000 // config.eval_batch_size)
  assert hours == pytest.approx((50_000 * 10 + calls * 5) / 3_600_000)


@pytest.mark.long
def test_compiled_hours_compiles_the_steps(tmp_path, monkeypatch):
  # Compile for a device of this machine, which takes less time.
  devices = jax.devices()[:1]
  monkeypatch.setattr(topologies, "describe_devices", lambda name: devices)
  (config, *_) = load(tmp_path, size="tiny", models=["linformer"])
  short = plans.DATA["listops"].sizes | {"max_len": 256}
  data = plans.DATA["listops"]._replace(sizes=short)
  hours = estimates.compiled_hours(config, data, "v5e:1x1")
  assert 0 < hours < 1
