"""Mamba against its recurrence, in parts and whole."""

import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import mamba
from tests.models.mixers import sequential

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"state_size": 4}


def outputs(params, x):
  """Algorithm 2 of Gu and Dao 2023, with the block of their figure 3."""
  size = params["A_log"].shape[1]
  u, z = np.split(sequential.linear(params["input"], x), 2, -1)
  u = sequential.silu(sequential.convolved(params, u))
  gates = sequential.linear(params["gates"], u)
  rank = gates.shape[1] - 2 * size
  step = gates[:, :rank] @ params["step"] + params["step_bias"]
  step = sequential.softplus(step)
  b, c = gates[:, rank : rank + size], gates[:, rank + size :]
  factor = np.exp(step[..., None] * -np.exp(params["A_log"]))
  h = sequential.states(factor, (step * u)[..., None] * b[:, None])
  y = (h * c[:, None]).sum(-1) + params["D"] * u
  return sequential.linear(params["output"], y * sequential.silu(z))


@pytest.mark.parametrize("part", [4, 128])
@pytest.mark.parametrize("options", [{}, {"expansion": 1, "step_rank": 3}])
def test_mamba_is_its_recurrence(monkeypatch, part, options):
  monkeypatch.setattr(mamba, "PART", part)
  sequential.check("mamba", outputs, SMALL | options, shift=0.1)


def test_mamba_is_its_recurrence_with_channels_last(monkeypatch):
  """The form for TPUs, whose kernel is interpreted here."""
  monkeypatch.setattr(mamba, "PART", 4)
  monkeypatch.setattr(mamba.platforms, "on_tpu", lambda: True)
  sequential.check("mamba", outputs, SMALL, shift=0.1)


def test_mamba_starts_as_published():
  params = sequential.init(MIXERS["mamba"](step_min=1e-3, step_max=0.1), 40)
  np.testing.assert_allclose(
    np.exp(params["A_log"]), np.tile(np.arange(1, 17), (80, 1)), rtol=1e-6
  )
  step = sequential.softplus(np.asarray(params["step_bias"], np.float64))
  assert 1e-3 * 0.99 <= step.min() < 2e-3 and 0.05 < step.max() <= 0.101
  assert params["step"].shape == (3, 80)  # d / 16, rounded up.
  np.testing.assert_array_equal(params["D"], 1)
  assert 0.45 < np.abs(params["conv"]).max() <= 0.5
