"""S5 against its recurrence, and its start."""

import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from tests.models.mixers import sequential
from tests.models.mixers.test_state_space import hippo_normal

SMALL = {"state_size": 8, "blocks": 2}


def discretize(eigenvalue, step, method):
  """Equation 6 of Smith et al. 2023, and the bilinear method."""
  if method == "zoh":
    factor = np.exp(step * eigenvalue)
    return factor, (factor - 1) / eigenvalue
  below = 1 - step * eigenvalue / 2
  return (1 + step * eigenvalue / 2) / below, step / below


def outputs(params, x, options):
  real = params["Lambda_re"]
  if options.get("clip_eigenvalues"):
    real = np.minimum(real, -1e-4)
  step = np.exp(params["log_step"][:, 0])
  factor, gain = discretize(
    real + 1j * params["Lambda_im"], step, options.get("discretization", "zoh")
  )
  b = gain[:, None] * (params["B"][..., 0] + 1j * params["B"][..., 1])
  drive = x @ b.T
  h = sequential.states(factor, drive)
  if not options.get("causal"):
    h = np.concatenate([h, sequential.states(factor, drive[::-1])[::-1]], 1)
  c = [params[name] for name in ("C", "C1", "C2") if name in params]
  c = np.concatenate([part[..., 0] + 1j * part[..., 1] for part in c], 1)
  y = 2 * (h @ c.T).real + params["D"] * x
  form = options.get("glu", "half1")
  return sequential.gated(form, sequential.gelu_tanh, params.get("gate", {}), y)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"causal": True, "glu": "half2", "c_init": "rows"},
    {"discretization": "bilinear", "c_init": "complex", "share_step": True},
    {"causal": True, "clip_eigenvalues": True, "glu": "full"},
  ],
)
def test_s5_is_its_recurrence(options):
  sequential.check(
    "s5",
    lambda params, x: outputs(params, x, options),
    SMALL | options,
    shift=0.1,
  )


def init(d=3, **options):
  return sequential.init(MIXERS["s5"](**options), d)


def test_s5_starts_from_half_of_the_eigenvalues_of_each_block():
  params = init(state_size=32, blocks=2)
  found = np.linalg.eigvals(hippo_normal(16))
  below = np.sort(found.imag)[:8]
  np.testing.assert_allclose(params["Lambda_im"], np.tile(below, 2), rtol=1e-6)
  np.testing.assert_allclose(params["Lambda_re"], -0.5, rtol=1e-6)
  step = np.exp(np.asarray(params["log_step"]))
  assert step.shape == (16, 1) and step.min() >= 1e-3 and step.max() <= 0.1


@pytest.mark.parametrize(
  ("c_init", "std"),
  # Normal numbers by an isometry keep their variance; half of V halves it.
  [
    ("lecun", (64 * 256 * 2) ** -0.5),
    ("rows", 128**-0.5),
    ("complex", 0.5**0.5),
  ],
)
def test_s5_output_matrix_starts_at_its_deviation(c_init, std):
  params = init(256, state_size=64, c_init=c_init, causal=True)
  found = float(np.asarray(params["C"]).std())
  wanted = std * np.sqrt(2 if c_init != "complex" else 1)
  assert abs(found / wanted - 1) < 0.05


@pytest.mark.slow
def test_s5_refuses_a_state_size_its_blocks_do_not_divide():
  with pytest.raises(ValueError, match="state_size=12.*4.*8"):
    init(state_size=12, blocks=4)
