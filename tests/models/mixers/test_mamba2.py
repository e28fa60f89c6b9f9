"""Mamba-2 against its recurrence."""

import functools

import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.mamba2 import find_width
from tests.models.mixers import sequential

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"state_size": 4}


def outputs(params, x, *, h, causal):
  """The block of Dao and Gu 2024, figure 6, with its state as a matrix."""
  u = sequential.linear(params["read"], x)
  u = sequential.silu(sequential.convolved(params, u))
  u, b, c = np.split(u, [12, 16], 1)
  u = sequential.by_heads(u, h)
  step = sequential.linear(params["step"], x) + params["step_bias"]
  step = sequential.softplus(step)
  b, c = (np.repeat(a[:, None], h, 1) for a in (b, c))
  run = functools.partial(
    sequential.read,
    c,
    b,
    step[..., None] * u,
    log_decay=-np.exp(params["A_log"]) * step,
  )
  y = run() if causal else run() + run(reverse=True)
  y = (y + params["D"][:, None] * u).reshape(len(x), -1)
  y = y * sequential.silu(sequential.linear(params["gate"], x))
  y = sequential.rms(y, params["norm"]["scale"])
  return sequential.linear(params["output"], y)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("h", [1, 3])
def test_mamba2_is_its_recurrence(h, causal):
  run = functools.partial(outputs, h=h, causal=causal)
  options = SMALL | {"num_heads": h, "causal": causal}
  sequential.check("mamba2", run, options, shift=0.1)


def test_mamba2_starts_as_published():
  params = sequential.init(MIXERS["mamba2"](num_heads=80), 40)
  factor = np.exp(params["A_log"])
  assert 1 <= factor.min() < 2 and 14 < factor.max() <= 16
  step = sequential.softplus(np.asarray(params["step_bias"], np.float64))
  assert 1e-3 * 0.99 <= step.min() < 3e-3 and 0.03 < step.max() <= 0.101
  np.testing.assert_array_equal(params["D"], 1)
  assert params["conv"].shape == (4, 80 + 2 * 128)
  assert 0.45 < np.abs(params["conv"]).max() <= 0.5


def test_heads_are_at_most_64_channels_wide():
  assert [find_width(inner) for inner in (128, 96, 64, 10, 134)] == [
    64,
    48,
    64,
    10,
    2,
  ]
  with pytest.raises(ValueError, match=r"num_heads=5 does not divide"):
    sequential.init(MIXERS["mamba2"](num_heads=5), 8)
