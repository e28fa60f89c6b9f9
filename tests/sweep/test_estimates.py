"""Estimates of runs, from costs of one layer and a measured rate."""

import dataclasses

import pytest

from jaxformers.models import build, cost
from jaxformers.sweep import estimates, plans
from jaxformers.sweep.runs import Sweep

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
  assert found.operations == pytest.approx(examples * 2 * 1e9)
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


@pytest.mark.parametrize(
  ("name", "dtype", "tera"),
  [
    ("h100", "float32", 494),
    ("h100", "bfloat16", 989),
    ("a100:8", "float32", 8 * 156),
    # Google Cloud counts cores of v4, and chips of v5e.
    ("v4-8", "float32", 4 * 275),
    ("v5e-8", "float32", 8 * 197),
    ("v4:8", "bfloat16", 8 * 275),
  ],
)
def test_accelerator_hours_follow_from_the_named_rate(
  name, dtype, tera, tmp_path
):
  assert estimates.accelerator_rate(name, dtype) == pytest.approx(tera * 1e12)
  cost = estimates.Estimate(1, 1.0, 1.0, 3_600 * tera * 1e12)
  (config, *_) = load(tmp_path, models=["transformer"])
  model = dataclasses.replace(config.model, dtype=dtype)
  config = dataclasses.replace(config, model=model)
  hours = estimates.accelerator_hours(cost, config, name)
  assert hours == pytest.approx(1 / estimates.ACCELERATOR_SHARE)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("h101", "accelerator.*'h101'.*h100"),
    ("h100-8", "h100:8"),
    ("h100:0", "h100:0: .*h100:8"),
    ("h100:", "h100:: .*h100:8"),
    ("v4-3", "--accelerator=v4-3.*v4-8"),
    ("v4:x", "v4:x: .*v4:4"),
  ],
)
def test_accelerator_rate_refuses_unknown_accelerators(name, message):
  with pytest.raises(ValueError, match=message):
    estimates.accelerator_rate(name, "float32")
