"""Estimates of runs, from costs of one layer and a measured rate."""

import pytest

from jaxformers.models import build, cost
from jaxformers.sweep import estimates, plans
from jaxformers.sweep.runs import Sweep


def load(tmp_path, name="2", **options):
  cells = plans.make_cells(plans.find_plan(name), None, **options)
  sweep = Sweep(tmp_path, [])
  return [sweep.load_config(cell, 0) for cell in cells]


def test_hours_and_memory_follow_from_the_cost_of_an_example(tmp_path):
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
    {**config, "accumulate": 4}, plans.DATA["retrieval"], count, rate=1e12
  )
  assert pair.hours > 2 * found.hours
  assert pair.gigabytes == pytest.approx((4 * 8 * 10 + state) / 1e9)


def test_a_layer_times_the_layers_is_the_cost_of_the_model(tmp_path):
  configs = load(tmp_path, size="tiny", models=["transformer"])[:2]
  known = [plans.DATA["listops"], plans.DATA["text"]]
  found = estimates.estimate_all(configs, known, rate=1e12)
  for config, data, one in zip(configs, known, found, strict=True):
    sizes = dict(data.sizes)
    sizes["max_len"] = config["task"].get("max_len") or sizes["max_len"]
    model = build(**config["model"], **sizes)
    whole = cost.count_cost(model, sizes["max_len"])
    memory = config["batch_size"] * whole.activations / 1e9
    assert one.gigabytes == pytest.approx(memory, rel=0.3)
    assert one.steps == config["total_steps"]


def test_the_rate_is_one_of_this_machine():
  assert 1e8 < estimates.measure_rate(256) < 1e16
