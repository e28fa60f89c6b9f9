"""Griffin's recurrent block against its recurrence."""

import jax
import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import rglru
from tests.models.mixers import sequential

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_heads": 2}


def by_heads(params, name, u):
  h, e, _ = params[name].shape
  y = np.einsum("nhe,hef->nhf", u.reshape(-1, h, e), params[name])
  return sequential.sigmoid(y + params[f"{name}_bias"]).reshape(u.shape)


def outputs(params, x):
  """Equations 1 to 4 of De et al. 2024; the first token has the factor 1."""
  gate = sequential.gelu_tanh(sequential.linear(params["gate"], x))
  u = sequential.convolved(params, sequential.linear(params["input"], x))
  remain, enter = by_heads(params, "remain", u), by_heads(params, "enter", u)
  log_a = -8 * remain * sequential.softplus(params["Lambda"])
  root = np.sqrt(1 - np.exp(2 * log_a))
  root[0] = 1
  h = sequential.states(np.exp(log_a), root * enter * u)
  return sequential.linear(params["output"], h * gate)


@pytest.mark.parametrize("options", [{}, {"width": 8, "num_heads": 4}])
def test_rglru_is_its_recurrence(options):
  sequential.check("rglru", outputs, SMALL | options, shift=0.1)


def test_rglru_factors_start_between_09_and_0999():
  params = sequential.init(MIXERS["rglru"](width=400), 4)
  start = np.exp(-sequential.softplus(np.asarray(params["Lambda"])))
  assert 0.9 <= start.min() < 0.92 and 0.99 < start.max() <= 0.999


def test_rglru_square_root_has_a_bounded_slope():
  slope = jax.grad(rglru._bounded_root)
  np.testing.assert_allclose(slope(0.0), 1_000, rtol=1e-6)
  np.testing.assert_allclose(slope(0.25), 1.0)


def test_causal_recurrences_refuse_causal_false():
  for name in ("rglru", "mamba"):
    with pytest.raises(ValueError, match=f"'{name}'.*causal=False.*lru"):
      sequential.init(MIXERS[name](causal=False), 4)
