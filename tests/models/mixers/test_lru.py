"""The Linear Recurrent Unit against its recurrence, and its start."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from tests.models.mixers import sequential

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"state_size": 8}


def outputs(params, x, options):
  """Equations of Orvieto et al. 2023, section 3.4, in one direction or two."""
  factor = np.exp(-np.exp(params["nu_log"]) + 1j * np.exp(params["theta_log"]))
  b = params["B_re"] + 1j * params["B_im"]
  drive = np.exp(params["gamma_log"]) * (x @ b.T)
  h = sequential.states(factor, drive)
  if not options.get("causal"):
    back = sequential.states(factor, drive[::-1])[::-1]
    h = np.concatenate([h, back], 1)
  c = params["C_re"] + 1j * params["C_im"]
  y = (h @ c.T).real + params["D"] * x
  form = options.get("glu", "full")
  return sequential.gated(form, sequential.gelu_tanh, params.get("gate", {}), y)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"causal": True, "glu": "half1"},
    {"glu": "half2", "r_min": 0.9, "r_max": 0.999},
    {"causal": True, "glu": "none", "max_phase": 0.3},
  ],
)
def test_lru_is_its_recurrence(options):
  sequential.check(
    "lru",
    lambda params, x: outputs(params, x, options),
    SMALL | options,
    shift=0.1,
  )


def test_lru_eigenvalues_start_on_the_ring():
  with jax.enable_x64(True):
    mixer = MIXERS["lru"](
      state_size=4_000, r_min=0.4, r_max=0.9, max_phase=0.5, dtype=jnp.float64
    )
    params = sequential.init(mixer, 3)
  square = np.exp(-2 * np.exp(np.asarray(params["nu_log"], np.float64)))
  chex.assert_trees_all_close(
    np.exp(2 * np.asarray(params["gamma_log"])), 1 - square, atol=1e-12
  )
  # Uniform in the area, and in the angle: quantiles to three deviations.
  quantiles = np.linspace(0, 1, 11)
  for values, low, high in (
    (square, 0.16, 0.81),
    (np.exp(np.asarray(params["theta_log"])), 0, 0.5),
  ):
    assert low <= values.min() and values.max() <= high
    found = (np.quantile(values, quantiles) - low) / (high - low)
    np.testing.assert_allclose(found, quantiles, atol=3 * 0.5 / np.sqrt(4_000))


def test_lru_refuses_r_min_above_r_max():
  with pytest.raises(ValueError, match="r_min=0.9.*r_max=0.5"):
    sequential.init(MIXERS["lru"](r_min=0.9, r_max=0.5), 3)
